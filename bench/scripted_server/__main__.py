"""The process. Its first line on stdout is the port."""

import argparse
import asyncio
import signal
from pathlib import Path

import msgspec
import uvloop

from bench.scripted_server.script import Script
from bench.scripted_server.server import Connection
from bench.scripted_server.stream import Log

_BACKLOG = 4096  # connections that may come at once


async def _serve(script: Script, log: Path | None, port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, ended.set)
    lines = Log(script, log)
    server = await loop.create_server(lambda: Connection(lines), "127.0.0.1", port, backlog=_BACKLOG)
    print(server.sockets[0].getsockname()[1], flush=True)
    await ended.wait()
    server.close()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="An OpenAI server whose delays and faults are known.")
    parser.add_argument("--script", type=Path, required=True, help="JSON, as bench.scripted_server.script has it")
    parser.add_argument("--log", type=Path, help="where a line is written as each answer ends")
    parser.add_argument("--port", type=int, default=0, help="0: any")
    arguments = parser.parse_args()
    script = msgspec.json.decode(arguments.script.read_bytes(), type=Script)
    uvloop.run(_serve(script, arguments.log, arguments.port))


if __name__ == "__main__":
    main()
