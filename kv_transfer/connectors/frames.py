"""What connectors that send frames have in common: the books of transfers, which rows a frame may go to, refusals."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer.connectors.base import PoolDescription, ReceiverConnector, SenderIdentity
from kv_transfer.references import BlockRef, check


class Refused(Exception):
    """A frame that is not written, with the word it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_destination(
    pool: PoolDescription,
    generation: Callable[[int], int],
    expected: Collection[int],
    layer: int,
    blocks: Sequence[BlockRef],
    num_bytes: int,
    num_layers: int = 1,
) -> None:
    """Raises Refused or StaleReference unless `num_bytes` fill these layers of `blocks`, all of them of `expected`.

    The layers are `num_layers` from `layer` on.
    """
    for ref in blocks:
        check(ref, pool.incarnation, pool.num_blocks, generation)
        if ref.block_id not in expected:
            raise Refused("foreign", f"block {ref.block_id} is not of this transfer")
    if not blocks or num_layers < 1 or not 0 <= layer <= pool.num_layers - num_layers:
        raise Refused("range", f"{num_layers} layers from {layer} on of {len(blocks)} blocks")
    if num_bytes != len(blocks) * num_layers * pool.layer_bytes:
        raise Refused("length", "the payload has another length than its blocks")


@dataclass(slots=True, eq=False)
class Expected:
    """A transfer that may write its blocks, and what has become of it so far."""

    blocks: frozenset[int]
    landed: int = 0  # bytes
    failure: str | None = None  # why a frame of it was refused or lost


class FrameReceiver(ReceiverConnector):
    """A receiver that writes each frame itself, so that it can shut a transfer out at once."""

    _expected: Mapping[str, Expected]  # by transfer

    def bytes_landed(self, transfer_id: str) -> int | None:
        """Bytes of whole frames written so far."""
        expected = self._expected.get(transfer_id)
        return expected.landed if expected else 0

    def failure(self, transfer_id: str) -> str | None:
        """Why a frame of the transfer was refused or lost."""
        expected = self._expected.get(transfer_id)
        return expected.failure if expected else None

    def fence(self, transfer_id: str, sender: SenderIdentity) -> bool:
        """Always at once."""
        self.finish(transfer_id)
        return True
