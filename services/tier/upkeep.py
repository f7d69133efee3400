"""What people ask of the KV service by `tandem cache`, and other processes beside transfers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Never

import grpc
import grpc.aio

from engine.hashing import HASH_BYTES
from engine.request import KvEvent
from kv_transfer.tiers.store import StoreError
from services.rpc import tiers_pb2, tiers_pb2_grpc
from services.tier.ahead import Ahead
from services.tier.below import Below
from services.tier.blocks import KeptBlocks
from services.tier.keeper import Keeper
from services.tier.pinning import Pinning
from services.worker.engine_thread import EngineThread

_MOST = 1000  # prefixes of one answer
_COPY_SECONDS = 60.0  # at most
_NAME = 128  # characters of a pin's name, at most


class Upkeep(tiers_pb2_grpc.TiersServicer):
    """`below`: the lower tiers, if there are any. `changed` is told what host memory has no more."""

    def __init__(
        self,
        thread: EngineThread,
        below: Below | None,
        keeper: Keeper,
        pinning: Pinning,
        ahead: Ahead | None,
        changed: Callable[[Sequence[KvEvent]], None],
    ) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self._thread = thread
        self._blocks = thread.engine
        self._below = below
        self._keeper = keeper
        self._pinning = pinning
        self._ahead = ahead
        self._changed = changed

    async def Top(
        self, request: tiers_pb2.TopRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.TopReply:
        """Hashes alone: prompts are not known here."""
        top = self._blocks.popular.top(min(request.count, _MOST))
        return tiers_pb2.TopReply(
            prefixes=[tiers_pb2.Prefix(block_hash=each, tokens=tokens, uses=uses) for each, tokens, uses in top]
        )

    async def Verify(
        self, request: tiers_pb2.VerifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.VerifyReply:
        """Host memory is not read: what it sends is compared by who gets it."""
        if self._below is None:
            return tiers_pb2.VerifyReply()
        right, wrong = await self._below.verify()
        return tiers_pb2.VerifyReply(right=right, wrong=wrong)

    async def Copy(
        self, request: tiers_pb2.CopyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.CopyReply:
        """For a worker that is about to sleep."""
        seconds = min(request.seconds, _COPY_SECONDS)
        return tiers_pb2.CopyReply(kept=await self._keeper.copy_all(request.worker, request.block_hashes, seconds))

    async def Drop(
        self, request: tiers_pb2.DropRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.DropReply:
        """What is held for a transfer under way stays until that is over, but is not found any more."""
        gone: set[bytes] = set()

        async def forget() -> None:
            hashes, events = await self._thread.call(self._blocks.forget)
            gone.update(hashes)
            self._changed(events)

        if self._below is None:
            await forget()
        else:
            gone.update(*(store.hashes() for store in self._below.stores))
            try:
                await self._below.drop(forget)
            except StoreError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return tiers_pb2.DropReply(blocks=len(gone))

    async def Pin(
        self, request: tiers_pb2.PinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.PinReply:
        """For a gateway, at a request of a session."""
        await _check_names(context, request.name, request.owner)
        if not (math.isfinite(request.seconds) and request.seconds >= 0):
            await _refuse(context, f"{request.seconds} is no time to pin for")
        if any(len(each) != HASH_BYTES for each in request.block_hashes):
            await _refuse(context, f"a block's hash has {HASH_BYTES} bytes")
        if not request.seconds:
            await self._pinning.release([request.name])
            return tiers_pb2.PinReply()
        self._keeper.wanted(request.block_hashes)
        granted = await self._pinning.pin(request.name, request.owner, request.block_hashes, request.seconds)
        return tiers_pb2.PinReply(blocks=granted.blocks, seconds=granted.seconds, limit=granted.limit)

    async def KeepPin(
        self, request: tiers_pb2.KeepPinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.KeepPinReply:
        """For `tandem cache pin`: what a request has pinned lasts."""
        await _check_names(context, request.name, request.lasting)
        return tiers_pb2.KeepPinReply(found=await self._pinning.keep(request.name, request.lasting))

    async def ReadAhead(
        self, request: tiers_pb2.ReadAheadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.ReadAheadReply:
        """For a router or a worker where a request waits."""
        if any(len(each) != HASH_BYTES for each in request.block_hashes):
            await _refuse(context, f"a block's hash has {HASH_BYTES} bytes")
        return tiers_pb2.ReadAheadReply(taken=self._ahead is not None and self._ahead.ask(list(request.block_hashes)))

    async def Unpin(
        self, request: tiers_pb2.UnpinRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.UnpinReply:
        """Unknown names are no error."""
        ended = await self._pinning.release(request.names)
        return tiers_pb2.UnpinReply(pins=ended + (await self._pinning.release_lasting() if request.all else 0))

    async def Pins(
        self, request: tiers_pb2.PinsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> tiers_pb2.PinsReply:
        """Sessions are counted alone."""
        return await self._pinning.state()


async def _check_names(context: grpc.aio.ServicerContext[Any, Any], *names: str) -> None:
    if any(len(name) > _NAME for name in names):
        await _refuse(context, f"a name has {_NAME} characters at most")


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], why: str) -> Never:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
    raise AssertionError("abort raises")
