"""Telling hosts and processes apart, and whether a process still lives."""

import os
from enum import Enum
from pathlib import Path

from kv_transfer.connectors.base import SenderIdentity

_EXITING = 0x4  # PF_EXITING


class Life(Enum):
    """How far a process is on its way."""

    LIVES = "lives"  # it has all its files
    ENDS = "ends"  # or it cannot be told: its files may be closed, some of them
    GONE = "gone"  # all its files are closed, and what their drivers do at the last close is done


def boot_id() -> str:
    """Random id of this boot of this host; equal for all processes that share its kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Equal for all processes that see each other by the same process ids. Empty: the kernel does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def identify(incarnation: str, process: int | None = None) -> SenderIdentity:
    """This process, or another of the same host. Raises OSError if there is none."""
    start_ticks = int(_stat("self" if process is None else process)[19])
    return SenderIdentity(incarnation, boot_id(), os.getpid() if process is None else process, start_ticks)


def life(process: SenderIdentity) -> Life:
    """Whether a process of this pid namespace still lives.

    An exiting process first marks its threads; then the last thread to come there closes the files, and does the work
    of their last close itself, before it becomes a zombie. So while the first thread bears no mark, no file was closed
    by an exit; and once it is a zombie with no other thread beside it, or was reaped, which needs the same, all is
    closed. A zombie with other threads is not enough: they share its files.
    """
    if process.boot_id != boot_id():
        return Life.ENDS  # perhaps another machine's
    try:
        stat = _stat(process.pid)
    except OSError:  # gone, or hidden: then it can still be asked for
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return Life.GONE
        except (OSError, OverflowError):
            pass
        return Life.ENDS
    state, flags, num_threads, start_ticks = stat[0], int(stat[6]), int(stat[17]), int(stat[19])
    if start_ticks != process.start_ticks:
        return Life.GONE  # the pid is another's now
    if state in "ZX":
        return Life.GONE if num_threads <= 1 else Life.ENDS
    return Life.ENDS if flags & _EXITING else Life.LIVES


def _stat(process: int | str) -> list[str]:
    """Fields of /proc/PID/stat from the third, the state, on."""
    stat = Path(f"/proc/{process}/stat").read_text()
    return stat[stat.rindex(")") + 2 :].split()
