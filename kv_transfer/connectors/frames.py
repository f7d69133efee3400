"""What connectors that send frames have in common: which rows a frame may go to, and how a refusal is told."""

from collections.abc import Callable, Collection, Sequence

from kv_transfer.connectors.base import PoolDescription
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
) -> None:
    """Raises Refused or StaleReference unless `num_bytes` fill one layer of `blocks`, all of them of `expected`."""
    for ref in blocks:
        check(ref, pool.incarnation, pool.num_blocks, generation)
        if ref.block_id not in expected:
            raise Refused("foreign", f"block {ref.block_id} is not of this transfer")
    if not blocks or not 0 <= layer < pool.num_layers:
        raise Refused("range", f"layer {layer} of {len(blocks)} blocks")
    if num_bytes != len(blocks) * pool.layer_bytes:
        raise Refused("length", "the payload has another length than its blocks")
