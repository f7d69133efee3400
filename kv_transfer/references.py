"""References to KV blocks that can be told from references to what the block held before."""

from collections.abc import Callable

import msgspec


class BlockRef(msgspec.Struct, array_like=True, frozen=True):
    """One block of one process, at one time of its life. `content_hash` is empty for a block that is not full."""

    incarnation: str
    block_id: int
    generation: int
    content_hash: bytes = b""


class StaleReference(Exception):
    """A reference to a block that is not, or no longer, what it says. `kind` is one of the words counted in metrics."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check(ref: BlockRef, incarnation: str, num_blocks: int, generation: Callable[[int], int]) -> None:
    """Raises StaleReference unless `ref` names the present content of a block of this process."""
    if ref.incarnation != incarnation:
        raise StaleReference("incarnation", "the block belongs to another incarnation of the worker")
    if not 0 <= ref.block_id < num_blocks:
        raise StaleReference("range", f"block {ref.block_id} is outside of the pool of {num_blocks}")
    if generation(ref.block_id) != ref.generation:
        raise StaleReference("generation", f"block {ref.block_id} was handed out again since")
