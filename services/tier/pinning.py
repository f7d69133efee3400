"""Pinned prefixes of the KV service: in host memory, and in the stores beneath it that decide themselves what goes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from kv_transfer.tiers.pins import Granted, Pins
from kv_transfer.tiers.store import Store
from services.rpc import tiers_pb2
from services.tier.blocks import KeptBlocks
from services.tier.metrics import TierMetrics
from services.worker.engine_thread import EngineThread


class Pinning:
    """Carries out what `pins` says. A block that is not here yet is pinned when it comes."""

    def __init__(self, thread: EngineThread, pins: Pins, stores: Sequence[Store], metrics: TierMetrics) -> None:
        assert isinstance(thread.engine, KeptBlocks)
        self._thread = thread
        self._blocks = thread.engine
        self._pins = pins
        self._stores = stores
        self._metrics = metrics

    async def pin(self, name: str, owner: str, hashes: Sequence[bytes], seconds: float) -> Granted:
        """See `Pins.pin`."""
        granted = self._pins.pin(name, owner, hashes, seconds, time.monotonic())
        if granted.limit:
            self._metrics.tier_pins_refused.labels(granted.limit).inc(len(hashes) - granted.blocks)
        await self._carry_out()
        return granted

    async def keep(self, name: str, lasting: str) -> bool:
        """See `Pins.keep`."""
        found = self._pins.keep(name, lasting)
        await self._carry_out()
        return found

    async def release(self, names: Sequence[str]) -> int:
        """Ends these pins; how many there were."""
        ended = sum(self._pins.release(name) for name in names)
        await self._carry_out()
        return ended

    async def release_lasting(self) -> int:
        """Ends all that do not end by themselves."""
        return await self.release([name for name, pin in self._pins.items() if pin.is_lasting])

    async def expire(self) -> None:
        """Ends what is over; to be called now and then."""
        self._pins.expire(time.monotonic())
        await self._carry_out()
        self._metrics.pinned(len(self._pins), await self._thread.call(lambda: len(self._blocks.pinned_here)))

    async def state(self) -> tiers_pb2.PinsReply:
        """What is pinned, by hashes alone."""
        here = await self._thread.call(lambda: set(self._blocks.pinned_here))
        lasting = [
            tiers_pb2.PinState(
                name=name, blocks=len(pin.hashes), here=len(here.intersection(pin.hashes)), block_hash=pin.hashes[-1]
            )
            for name, pin in self._pins.items()
            if pin.is_lasting
        ]
        return tiers_pb2.PinsReply(
            lasting=lasting,
            sessions=len(self._pins) - len(lasting),
            blocks=self._pins.blocks,
            here=len(here),
            most=self._pins.most,
        )

    async def _carry_out(self) -> None:
        pinned, ended = self._pins.drain()
        if pinned or ended:
            for store in self._stores:
                store.pin(pinned)
                store.unpin(ended)
            await self._thread.call(partial(self._blocks.change_pins, pinned, ended))
