"""One transfer into this worker, as its parts are known on the event loop."""

from dataclasses import dataclass, field

from kv_transfer import receiver as rx
from kv_transfer.connectors.base import ReceiverConnector
from kv_transfer.references import BlockRef
from services.worker.links import Link
from services.worker.timelines import Timeline

Prefix = tuple[str, tuple[int, ...]]  # salt and tokens


@dataclass(slots=True)
class Receiving:
    """One transfer under way."""

    request_id: str  # of the engine's reservation
    machine: rx.ReceiverTransfer
    link: Link
    connector: ReceiverConnector  # the one that may write
    blocks: list[BlockRef]  # pages of all ranks for each block
    timeline: Timeline
    started: float
    landed_at: float = 0.0
    quarantine: list[int] = field(default_factory=list)  # blocks that the writer may still write
    prefix: Prefix | None = None  # what others wait for that want the same

    @property
    def fetches(self) -> bool:
        """Whether it brings what a peer has cached, rather than a prompt that the peer computes."""
        return self.machine.order.cached_only
