"""A process that has imported what members of a cluster need, and forks into them.

`tandem up` runs it (services/forked.py): `python -m services.fork_server MODULE...`. Imports are most of a worker's
start, and its forks share their memory. It imports, and then only forks: it has no threads, no sockets but one, and
touches no device, so that its forks are as good as new processes. It never reads what it is sent, since that has
secrets that are for one fork alone.
"""

import contextlib
import gc
import importlib
import os
import select
import socket
import sys
import time

import msgspec
import setproctitle

from services.process import die_with_parent

MESSAGE_BYTES = 128 << 10  # of one start at most; what the kernel keeps for a socket is more


class Start(msgspec.Struct, frozen=True):
    """What a fork is to run: `main()` of a module. Two files come with it: its output, and where it writes its pid."""

    module: str
    arguments: list[str]
    env: dict[str, str]  # the whole environment
    parent: int  # pid of the supervisor


def serve(connection: socket.socket) -> Start | None:
    """Forks once for each message, until the other end closes: None. In each fork: what it is to run."""
    while True:
        select.select([connection], [], [])
        try:
            if not connection.recv(1, socket.MSG_PEEK):
                return None
        except ConnectionError:
            return None
        # A process between, which ends at once, so that the supervisor becomes the parent and learns how the fork ends.
        between = os.fork()
        if between == 0:
            start = _between(connection)
            connection.close()
            return start
        os.waitpid(between, 0)  # it has read the message


def _between(connection: socket.socket) -> Start:
    """Returns in the fork of the fork alone."""
    message, files, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    between = os.getpid()
    if os.fork():
        os._exit(0)
    start = msgspec.json.decode(message, type=Start)
    output, answer = files
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0005)
    die_with_parent(start.parent)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(start.env)
    sys.argv = [start.module, *start.arguments]
    _name(*sys.argv)
    with open(answer, "wb") as file, contextlib.suppress(BrokenPipeError):
        file.write(b"%d" % os.getpid())
    return start


def _name(*arguments: str) -> None:
    """Has ps and top show this process as if it had been started as `python -m ARGUMENT...`."""
    setproctitle.setproctitle(" ".join((sys.executable, "-m", *arguments)))
    setproctitle.setthreadtitle(os.path.basename(sys.executable))


def main() -> None:
    """Standard input is the socket."""
    connection = socket.socket(fileno=os.dup(0))
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _name("services.fork_server", *sys.argv[1:])
    gc.collect()
    gc.freeze()  # collections of the forks leave shared memory alone
    start = serve(connection)
    if start is not None:
        importlib.import_module(start.module).main()


if __name__ == "__main__":
    main()
