"""Telling hosts and processes apart."""

import os
from pathlib import Path

from kv_transfer.connectors.base import SenderIdentity


def boot_id() -> str:
    """Random id of this boot of this host; equal for all processes that share its kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(incarnation: str) -> SenderIdentity:
    """This process."""
    stat = Path("/proc/self/stat").read_text()
    start_ticks = int(stat[stat.rindex(")") + 2 :].split()[19])
    return SenderIdentity(incarnation, boot_id(), os.getpid(), start_ticks)
