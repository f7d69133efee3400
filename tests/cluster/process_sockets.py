"""Sockets of other processes, cut from outside as a failing network would."""

import contextlib
import ctypes
import os
import re
import socket
from collections import Counter
from collections.abc import Iterator

_PIDFD_GETFD = 438  # the number of the system call


def sockets_of(pid: int) -> Iterator[socket.socket]:
    """A second descriptor for each TCP socket of a process. Raises PermissionError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if not re.match("socket:", os.readlink(f"/proc/{pid}/fd/{name}")):
                    continue
                descriptor = libc.syscall(_PIDFD_GETFD, process, int(name), 0)
                if descriptor < 0:
                    if ctypes.get_errno() == 1:
                        raise PermissionError("sockets of other processes cannot be had here")
                    continue
                with socket.socket(fileno=descriptor) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                        yield found
    finally:
        os.close(process)


def cut_streams(pid: int, number: int) -> int:
    """Cuts the connections of a process to the far port to which it has just so many; returns how many were cut."""

    def far(found: socket.socket) -> int | None:
        try:
            return int(found.getpeername()[1])
        except OSError:
            return None  # it listens, or is gone

    ports = Counter(far(found) for found in sockets_of(pid))
    wanted = {port for port, count in ports.items() if port is not None and count == number}
    cut = 0
    for found in sockets_of(pid):
        if far(found) in wanted:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut
