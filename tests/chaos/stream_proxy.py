"""A TCP proxy between the two ends of a connector: passes KV bytes on, with faults, in units that the ends know."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

import msgspec
from chaos.faults import Faults
from chaos.flow import Cut, Flow

from kv_transfer.connectors import tcp_wire

Units = Callable[[asyncio.StreamReader], AsyncIterator[tuple[bytes, bool]]]  # (bytes, whether faults may hit them)
_TRANSFER = re.compile(rb"q\d+/\d+")  # ids of the harness, wherever they stand


async def zmtp_units(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Whole messages of ZMTP 3; greeting and commands are left alone."""
    for part in (10, 1, 53):  # each side says the next part of its greeting when it has heard the other's
        yield await reader.readexactly(part), False
    message = b""
    while True:
        flags = await reader.readexactly(1)
        size = await reader.readexactly(8 if flags[0] & 2 else 1)
        message += flags + size + await reader.readexactly(int.from_bytes(size, "big"))
        if flags[0] & 4:
            yield message, False
        elif flags[0] & 1:
            continue
        else:
            yield message, True
        message = b""


async def tcp_units(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """Frames of the TCP connector; the two parts of the sender's greeting are left alone."""
    for part in (48, 32):
        yield await reader.readexactly(part), False
    while True:
        prefix = await reader.readexactly(tcp_wire.PREFIX_BYTES)
        header = await reader.readexactly(int.from_bytes(prefix[:4], "little"))
        payload = await reader.readexactly(msgspec.msgpack.decode(header, type=tcp_wire.Header).wire_bytes)
        yield prefix + header + payload, True


async def pair_units(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bool]]:
    """What a sender tells over the stream of a pair: entries, then headers; their payloads go elsewhere."""
    for part in (48, 32):
        yield await reader.readexactly(part), False
    while True:
        prefix = await reader.readexactly(tcp_wire.PREFIX_BYTES)
        yield prefix + await reader.readexactly(int.from_bytes(prefix[:4], "little")), True


class StreamProxy:
    """Stands at `port` for the receiver at `target`, for any number of connections."""

    def __init__(self, faults: Faults, units: Units) -> None:
        self.port = 0
        self.connections = 0
        self._faults = faults
        self._units = units
        self._target = ("", 0)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            pumps = [
                asyncio.create_task(self._forward(reader, far_writer)),
                asyncio.create_task(self._back(far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                far_writer.transport.abort()
        except OSError:
            pass  # the receiver is gone
        finally:
            writer.transport.abort()  # a reset, not a goodbye
            self._open.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        flow = Flow(self._faults, "bytes", write, _transfer_of)
        try:
            async for unit, mortal in self._units(reader):
                if mortal:
                    await flow.pass_on(unit)
                else:
                    await write(unit)
        except (Cut, OSError, asyncio.IncompleteReadError):
            pass
        finally:
            flow.stop()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 14):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


def _transfer_of(unit: bytes) -> str:
    found = _TRANSFER.search(unit)
    return found.group().decode() if found else "?"
