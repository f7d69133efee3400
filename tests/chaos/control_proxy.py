"""A gRPC server between the two workers: passes the raw messages of `Transfer.Connect` on, with faults."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from chaos.faults import Faults
from chaos.flow import Cut, Flow

from services.rpc import transfer_pb2
from services.rpc_server import _OPTIONS

_METHOD = "/tandem.v1.Transfer/Connect"


def _transfer_of(message: bytes) -> str:
    try:
        return transfer_pb2.SenderFrame.FromString(message).transfer_id or "handshake"
    except Exception:
        return "?"


class ControlProxy(grpc.GenericRpcHandler):
    """Stands at `address` for the prefill worker at `target`."""

    def __init__(self, faults: Faults) -> None:
        self.target = ""
        self.address = ""
        self._faults = faults
        self._server = grpc.aio.server(options=_OPTIONS)

    async def start(self, target: str) -> None:
        self.target = target
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method != _METHOD:
            return None
        return grpc.stream_stream_rpc_method_handler(self._connect)  # without serializers: bytes

    async def _connect(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        onward: asyncio.Queue[bytes | None] = asyncio.Queue()
        back: asyncio.Queue[bytes | None] = asyncio.Queue()
        channel = grpc.aio.insecure_channel(self.target, options=_OPTIONS)
        call = channel.stream_stream(_METHOD)(_until_none(onward))
        pumps = [
            asyncio.create_task(self._pump(requests, "order", onward, back)),
            asyncio.create_task(self._pump(call, "answer", back, back)),
        ]
        try:
            while (message := await back.get()) is not None:
                yield message
        finally:
            onward.put_nowait(None)
            call.cancel()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await channel.close()

    async def _pump(
        self,
        source: AsyncIterator[bytes],
        place: str,
        out: "asyncio.Queue[bytes | None]",
        end: "asyncio.Queue[bytes | None]",
    ) -> None:
        flow = Flow(self._faults, place, out.put, _transfer_of)
        try:
            async for message in source:
                await flow.pass_on(message)
        except (Cut, grpc.aio.AioRpcError, grpc.aio.UsageError):
            pass
        finally:
            flow.stop()
            with contextlib.suppress(asyncio.QueueFull):
                end.put_nowait(None)


async def _until_none(queue: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    while (message := await queue.get()) is not None:
        yield message
