"""A part of a core for each process, so that a small machine stands for one with a core for each worker.

Linux cgroups, version 1, as root: a group for each process beneath the CPU controller, whose threads together get so
much of a core and no more, whatever the others do. Short periods, so that a step is slowed and not interrupted.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.errors import BenchError

_CONTROLLER = Path("/sys/fs/cgroup/cpu")
_PERIOD = 5_000  # microseconds
_WEIGHT = 1 << 18  # beside everything else on the machine
_WORKERS = ("prefill-", "decode-", "aggregated-")


@contextlib.contextmanager
def core_shares(pids: Mapping[str, int], share: float | None) -> Iterator[None]:
    """Until the end of the block the workers among these processes have `share` of a core each. None: as they are.

    Raises BenchError where that cannot be had.
    """
    groups: list[Path] = []
    try:
        for name, pid in pids.items() if share is not None else ():
            if name.startswith(_WORKERS):
                groups.append(_CONTROLLER / f"tandem-{name}-{pid}")
                _limit(groups[-1], pid, share or 0.0)
        yield
    finally:
        for group in groups:
            with contextlib.suppress(OSError):  # it may have ended
                for left in (group / "cgroup.procs").read_text().split():
                    (_CONTROLLER / "cgroup.procs").write_text(left)
                group.rmdir()


def _limit(group: Path, pid: int, share: float) -> None:
    """Into a new group with the process, or BenchError."""
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(max(1_000, round(share * _PERIOD))))
        (group / "cpu.shares").write_text(str(_WEIGHT))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise BenchError(f"shares of cores need root and Linux cgroups of version 1 ({error})") from error
