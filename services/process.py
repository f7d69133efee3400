"""What every service process does alike: an incarnation, signals, the event loop, its share of the machine."""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from services import logs, tracing
from services.config import ClusterConfig

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)  # loaded here: after a fork there must be no loading


def new_incarnation() -> str:
    """Random 128-bit id of this start of a process, 32 hex digits."""
    return secrets.token_hex(16)


def stop_signal() -> asyncio.Event:
    """An event that is set by SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def set_up(config: ClusterConfig, role: str) -> None:
    """Has the process log and, where a collector is named, trace."""
    logs.configure(config.log_level, config.log_format)
    tracing.configure(role, config.name)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service on uvloop; afterwards its last spans are sent."""
    try:
        uvloop.run(main)
    finally:
        tracing.shutdown()


def die_with_parent(parent: int) -> None:
    """To be run in a child before exec: it gets SIGTERM when its parent dies, however that dies. `parent`: its pid."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def adopt_orphans() -> None:
    """From now on this process is the parent of those among its descendants whose own parent has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def seconds_since_start() -> float:
    """How long this process has run, its imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # proc(5): starttime, since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def available_cores() -> int:
    """Cores that this process may use: of its CPU set, and no more than the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, -(-int(quota) // int(period)))  # "max": no quota
    return max(1, cores)
