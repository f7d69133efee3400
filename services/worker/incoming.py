"""One transfer into this worker, as its parts are known on the event loop."""

import time
from dataclasses import dataclass, field

import msgspec

from engine.engine import Reservation
from engine.kv_cache import KVCache
from engine.request import Request
from kv_transfer import receiver as rx
from kv_transfer.connectors.base import ReceiverConnector
from kv_transfer.messages import FirstToken, Order
from kv_transfer.references import BlockRef
from services.tracing import Span
from services.worker.links import Link
from services.worker.timelines import Timeline

Prefix = tuple[str, tuple[object, ...]]  # salt, and tokens or hashes of blocks


@dataclass(slots=True)
class Receiving:
    """One transfer under way."""

    request_id: str  # of the engine's reservation
    machine: rx.ReceiverTransfer
    link: Link
    connector: ReceiverConnector  # the one that may write
    blocks: list[BlockRef]  # pages of all ranks for each block
    timeline: Timeline
    span: Span
    started: float
    landed_at: float = 0.0
    stages: list[tuple[str, float, float]] = field(default_factory=list)  # of the sender, on this worker's clock
    quarantine: list[int] = field(default_factory=list)  # blocks that the writer may still write
    prefix: Prefix | None = None  # what others wait for that want the same
    tier: str = ""  # in which the KV service has what it sends; empty: a worker sends

    def prefilled(self, first: FirstToken) -> None:
        """The first token is there, now."""
        end = time.monotonic()
        begin = end - first.prefill_seconds
        self.stages = [("queue", begin - first.queue_seconds, begin), ("prefill", begin, end)]

    @property
    def fetches(self) -> bool:
        """Whether it brings what a peer has cached, rather than a prompt that the peer computes."""
        return self.machine.order.cached_only


def references(incarnation: str, cache: KVCache, reservation: Reservation) -> list[BlockRef]:
    """The pages of all ranks that are to be written, block by block."""
    return [
        BlockRef(incarnation, rank * cache.num_blocks + block_id, generation)
        for block_id, generation in zip(
            reservation.block_ids[reservation.num_cached_blocks :],
            reservation.generations[reservation.num_cached_blocks :],
            strict=True,
        )
        for rank in range(cache.spec.ranks)
    ]


def prefix_order(
    transfer_id: str,
    request: Request,
    token_ids: list[int],
    blocks: list[BlockRef],
    skip_blocks: int,
    connector: str,
    lease_seconds: float,
    tier: str,
) -> Order:
    """Asks for what a peer has cached of these leading tokens of a request. `tier` as in `Order`."""
    changed = {"request_id": transfer_id, "prompt_token_ids": token_ids, "output_token_ids": list[int]()}
    return Order(
        transfer_id=transfer_id,
        request=msgspec.structs.replace(request, **changed),
        blocks=blocks,
        skip_blocks=skip_blocks,
        reply_to="",
        lease_seconds=lease_seconds,
        connector=connector,
        cached_only=True,
        tier=tier,
    )
