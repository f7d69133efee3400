"""Telling hosts and processes apart, so that a writer into shared memory can be known to be dead."""

import os
from pathlib import Path

from kv_transfer.connectors.base import SenderIdentity


def boot_id() -> str:
    """Random id of this boot of this host; equal for all processes that share its kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def identify(incarnation: str) -> SenderIdentity:
    """This process."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    return SenderIdentity(incarnation, boot_id(), os.getpid(), ticks)


def is_dead(process: SenderIdentity) -> bool:
    """Whether the process is surely gone. A process of another host or namespace is never known to be."""
    return process.boot_id == boot_id() and start_ticks(process.pid) != process.start_ticks
