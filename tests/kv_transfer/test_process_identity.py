"""How far a process is on its way to its end, which decides whether what it has queued may still run."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import pytest

from kv_transfer.process_identity import Life, identify, life

# Its first thread ends by itself, another goes on and keeps the files.
HEADLESS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall({exit}, 0)
"""


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.005)


def test_a_process_lives_until_it_is_killed_and_is_gone_as_a_zombie() -> None:
    assert life(identify("me")) is Life.LIVES
    child = subprocess.Popen(["sleep", "60"])
    identity = identify("child", child.pid)
    assert life(identity) is Life.LIVES
    assert life(msgspec.structs.replace(identity, start_ticks=identity.start_ticks - 1)) is Life.GONE
    assert life(msgspec.structs.replace(identity, boot_id="of another machine")) is Life.ENDS
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert life(identity) is Life.GONE
    child.wait()
    assert life(identity) is Life.GONE


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
def test_a_process_whose_first_thread_is_a_zombie_still_has_its_files() -> None:
    script = HEADLESS.format(exit=60 if platform.machine() == "x86_64" else 93)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    identity = identify("child", child.pid)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    wait_until(lambda: life(identity) is not Life.LIVES)
    time.sleep(0.1)
    assert life(identity) is Life.ENDS
    child.kill()
    wait_until(lambda: life(identity) is Life.GONE)
    child.communicate()
