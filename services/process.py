"""What every service process does alike: an incarnation, signals, the event loop."""

import asyncio
import secrets
import signal
from collections.abc import Coroutine
from typing import Any

import uvloop


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


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a service on uvloop."""
    uvloop.run(main)
