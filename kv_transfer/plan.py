"""What of a sender's pages goes where in a receiver's, when the two do not lay out their blocks alike.

Both sides keep the same layers, heads and tokens of one model. Block size, type of the numbers and number of ranks may
differ. A page is what one rank holds of a block; a worker of several ranks counts its pages through, so that rank r's
page of block b is number `r * num_blocks + b`. Where a destination page is a source page, the plan names it and nothing
is copied. Else whole destination pages are packed, on the device of the source: receivers and connectors know one kind
of page, their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from engine.kv_cache import KVCacheSpec
from kv_transfer.checksums import beside_steps, page_sums
from kv_transfer.messages import Order
from kv_transfer.references import BlockRef

_PACKED_BYTES = 4 << 20  # what checksums are taken of at a time
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


SumsOf = Callable[[torch.Tensor, Sequence[int]], list[int]]  # as `page_sums`


class PlanError(ValueError):
    """Blocks of these two layouts do not hold the same things; says what differs."""


@dataclass(frozen=True, slots=True)
class Push:
    """One call of a connector: layers of rows `source_rows` of `source` [., L, page, heads, 2 * dim] to `blocks`."""

    layers: range
    source: torch.Tensor
    source_rows: Sequence[int]
    blocks: Sequence[BlockRef]


class TransferPlan:
    """From pages of layout `source` to pages of layout `destination`, as `KVCacheSpec.layout` names them.

    Raises PlanError if they are of different models, or one of them is no layout.
    """

    def __init__(self, source: str, destination: str) -> None:
        try:
            self.source, self.destination = KVCacheSpec.parse(source), KVCacheSpec.parse(destination)
        except ValueError as error:
            raise PlanError(str(error)) from error
        for what, ours, theirs in zip(
            ("layers", "KV heads", "numbers in a head"), _model(self.source), _model(self.destination), strict=True
        ):
            if ours != theirs:
                raise PlanError(f"the receiver's blocks have {theirs} {what}, ours {ours}: serve the same model")
        self.is_identity = source == destination
        self._factors = _factors(self.source, self.destination)
        self._factors_on: dict[torch.device, torch.Tensor] = {}

    def pushes(
        self, pages: torch.Tensor, layers: range, source_blocks: Sequence[int], order: Order, start: int, end: int
    ) -> Iterator[Push]:
        """What brings some layers of tokens `start` to `end` of a sequence to the receiver, as far as it is ordered.

        `pages` [., L, page, heads, 2 * dim] are the sender's of all ranks; `source_blocks` hold the sequence from its
        first token on. Blocks that are not full yet go out as they are: they have to be pushed again.
        """
        ranks, skip = self.destination.ranks, order.skip_blocks
        wanted = self._ordered(order, start, end)
        if not wanted:
            return
        blocks = order.blocks[(wanted.start - skip) * ranks : (wanted.stop - skip) * ranks]
        source_blocks = source_blocks[: -(-end // self.source.block_size)]
        for rank in range(ranks):
            if self.is_identity:
                first = rank * (len(pages) // ranks)
                rows = [first + source_blocks[block] for block in wanted]
                yield Push(layers, pages, rows, blocks[rank::ranks])
                continue
            for layer in layers:
                packed = self._pack(pages[:, layer : layer + 1], slice(layer, layer + 1), source_blocks, wanted, rank)
                # Only one layer of these pages is there, and only that one is pushed.
                source = packed.expand(-1, self.source.num_layers, -1, -1, -1)
                yield Push(range(layer, layer + 1), source, range(len(wanted)), blocks[rank::ranks])

    def checksums(
        self, pages: torch.Tensor, source_blocks: Sequence[int], order: Order, sums_of: SumsOf | None = None
    ) -> list[int]:
        """The sums of the pages that were ordered, once all layers of all tokens are there.

        `sums_of` tells those of pages that go out as they are; others are packed once more.
        """
        ranks, num_pages = self.destination.ranks, len(pages) // self.source.ranks
        source_blocks = source_blocks[: -(-order.num_tokens // self.source.block_size)]
        ordered = self._ordered(order, 0, order.num_tokens)
        if self.is_identity:
            rows = [rank * num_pages + source_blocks[block] for block in ordered for rank in range(ranks)]
            return (sums_of or page_sums)(pages, rows)
        at_once = max(1, _PACKED_BYTES // (ranks * self.destination.block_bytes))
        sums: list[int] = []
        for first in range(ordered.start, ordered.stop, at_once):
            wanted = range(first, min(first + at_once, ordered.stop))
            with beside_steps(pages.device):
                packed = (self._pack(pages, slice(None), source_blocks, wanted, rank) for rank in range(ranks))
                of_ranks = [page_sums(found, range(len(found))) for found in packed]
            sums += [value for block in zip(*of_ranks, strict=True) for value in block]
        return sums

    def leading(self, order: Order, num_tokens: int) -> Order | None:
        """The order, cut to the receiver's blocks that so many leading tokens fill; None if they fill none of them."""
        size, ranks = self.destination.block_size, self.destination.ranks
        num_blocks = min(num_tokens // size - order.skip_blocks, len(order.blocks) // ranks)
        if num_blocks < 1:
            return None
        token_ids = order.request.prompt_token_ids[: (order.skip_blocks + num_blocks) * size]
        request = replace(order.request, prompt_token_ids=token_ids)
        return replace(order, request=request, blocks=order.blocks[: num_blocks * ranks])

    def _ordered(self, order: Order, start: int, end: int) -> range:
        """Blocks of the receiver that hold tokens `start` to `end` and were ordered."""
        size, skip = self.destination.block_size, order.skip_blocks
        last = skip + len(order.blocks) // self.destination.ranks
        return range(max(skip, start // size), min(-(-end // size), last))

    def _pack(
        self, pages: torch.Tensor, layers: slice, source_blocks: Sequence[int], wanted: range, rank: int
    ) -> torch.Tensor:
        """Pages [len(wanted), l, page, heads, 2 * dim] of one rank of the receiver, from `pages` [., l, ...].

        Tokens that the source blocks do not have are zeros.
        """
        source, destination = self.source, self.destination
        start, end = wanted.start * destination.block_size, wanted.stop * destination.block_size
        first = start // source.block_size
        held = list(source_blocks[first : -(-end // source.block_size)])
        parts = [
            _rows(pages[:, :, :, heads.start : heads.stop], [page + block for block in held])
            for page, heads in self._heads_of(rank, len(pages) // source.ranks)
        ]
        gathered = torch.cat(parts, dim=3)  # [blocks, l, page, heads, bytes]
        num_layers, num_heads, num_bytes = gathered.shape[1], gathered.shape[3], gathered.shape[4]
        tokens = gathered.transpose(1, 2).reshape(-1, num_layers, num_heads, num_bytes)
        tokens = tokens[start - first * source.block_size :][: end - start]
        if (missing := end - start - len(tokens)) > 0:
            tokens = torch.cat((tokens, tokens.new_zeros(missing, num_layers, num_heads, num_bytes)))
        values = self._converted(tokens, layers)
        packed = values.view(len(wanted), destination.block_size, num_layers, num_heads, -1)
        return packed.transpose(1, 2).contiguous().view(destination.dtype)

    def _heads_of(self, rank: int, num_blocks: int) -> Iterator[tuple[int, range]]:
        """(the sender's first page, heads in it) of each of the sender's ranks that has heads of the receiver's."""
        ours, theirs = self.source.num_kv_heads, self.destination.num_kv_heads
        for sender in range(rank * theirs // ours, -(-(rank + 1) * theirs // ours)):
            start, end = max(0, rank * theirs - sender * ours), min(ours, (rank + 1) * theirs - sender * ours)
            yield sender * num_blocks, range(start, end)

    def _converted(self, tokens: torch.Tensor, layers: slice) -> torch.Tensor:
        """Bytes [tokens, l, heads, bytes] of the sender as bytes of the receiver."""
        source, destination = self.source.dtype, self.destination.dtype
        if source == destination and self._factors is None:
            return tokens
        values = tokens.view(source)
        if source.itemsize == 1:
            values = values.to(torch.float32)
        if self._factors is not None:  # [L, K or V]
            factors = self._factors_for(values)[layers]
            values = (values.view(*values.shape[:-1], 2, -1) * factors[:, None, :, None]).flatten(-2)
        if destination == torch.float8_e4m3fn:
            values = values.clamp(-_LARGEST_FP8, _LARGEST_FP8)  # as the cache does with what is too large
        return values.to(destination).view(torch.uint8)

    def _factors_for(self, values: torch.Tensor) -> torch.Tensor:
        """The factors [L, 2] beside the values, which are of one type in all of a plan.

        They get there once, by a copy that is waited for: then any stream of the device may read them.
        """
        assert self._factors is not None
        if (found := self._factors_on.get(values.device)) is None:
            found = self._factors_on[values.device] = self._factors.to(values.dtype).to(values.device)
        return found


def _model(spec: KVCacheSpec) -> tuple[int, int, int]:
    """What two layouts must have in common."""
    return spec.num_layers, spec.ranks * spec.num_kv_heads, spec.head_dim


def _factors(source: KVCacheSpec, destination: KVCacheSpec) -> torch.Tensor | None:
    """[L, 2], what the sender's keys and values are multiplied by; None: all by 1."""
    if source.scales == destination.scales:
        return None
    none = ((0, 0),) * source.num_layers
    exponents = torch.tensor(source.scales or none) - torch.tensor(destination.scales or none)
    return torch.exp2(exponents.float())


def _rows(pages: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Bytes of some rows of a tensor [., ..., dim]: [rows, ..., bytes]. FP8 can be gathered as bytes only."""
    if pages.is_cpu:
        index = torch.tensor(rows)
    else:
        from engine.kernels.copy_rows import on_device

        index = on_device(rows, pages.device)  # as this is done for each layer in between the engine's kernels
    return pages.view(torch.uint8).index_select(0, index)
