"""Tells KV services what requests will ask for that wait: they read it into host memory meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import structlog

from services.rpc import tiers_pb2, tiers_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of, make_channel
from services.security import ClusterKey

log = structlog.get_logger()

_UNDER_WAY = 16  # calls; what else waits is not told
_CALL_SECONDS = 2.0
_CHANNELS = 8  # that are kept open; KV services come and go


class ReadAhead:
    """Calls that nobody waits for, and that may fail."""

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def ask(self, address: str, hashes: Sequence[bytes]) -> None:
        """Of the KV service there, leading blocks of a prompt."""
        if len(self._calls) < _UNDER_WAY:
            task = asyncio.get_running_loop().create_task(self._ask(address, hashes))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _ask(self, address: str, hashes: Sequence[bytes]) -> None:
        channel = self._channels.pop(address, None) or make_channel(address, self._key)
        self._channels[address] = channel  # behind those that were used before
        if len(self._channels) > _CHANNELS:
            await self._channels.pop(next(iter(self._channels))).close()
        request = tiers_pb2.ReadAheadRequest(block_hashes=hashes)
        try:
            await answer_of(tiers_pb2_grpc.TiersStub(channel).ReadAhead(request, timeout=_CALL_SECONDS))
        except (grpc.aio.AioRpcError, ChannelClosed) as error:
            log.debug("a KV service does not read ahead", address=address, error=str(error))
