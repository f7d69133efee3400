"""The blocks that the KV service keeps: an engine without a model, whose whole memory is prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from engine.config import ModelConfig
from engine.engine import Engine, EngineConfig, Reservation
from engine.hashing import block_hashes, root_hash
from engine.kv_cache import KVCacheSpec
from engine.loaded import LoadedModel
from engine.parallel.group import Group
from engine.request import KvEvent, Request, SamplingParams
from kv_transfer.connectors.shared_memory import SharedSegment
from kv_transfer.tiers.policies.base import Policy
from kv_transfer.tiers.policies.lru import LRU
from services.config import ConfigError
from services.tier.kept_pool import KeptPool
from services.tier.lineage import Lineage
from services.tier.metrics import TierMetrics
from services.tier.popular import Popular

_REMEMBERED = 8  # times as many blocks as there is room for, of which is known where they come in their prompts


class _Ranks(Group):
    """Those whose pages make up a block. Nothing is computed by them here."""

    def __init__(self, size: int) -> None:
        self.size = size


class Asked(NamedTuple):
    """What a worker asks for: tokens from `start` to `end` of a prompt, as it has those before."""

    start: int
    end: int
    promoted: Mapping[str, int] = {}  # blocks that have just come from stores, by their names


class KeptBlocks(Engine):
    """Blocks of the workers with this fingerprint and layout, given up as a policy says.

    What comes from a worker is a request by block hashes, and over when its blocks have landed or will not:
    `on_over(request id, blocks that landed)` is called then, `on_used(hashes)` when a worker gets blocks, both on the
    engine's thread.
    """

    def __init__(
        self,
        fingerprint: str,
        layout: str,
        memory: int,
        segment: SharedSegment | None,
        metrics: TierMetrics,
        make_policy: Callable[[int], Policy] = LRU,
    ) -> None:
        spec = KVCacheSpec.parse(layout)
        num_blocks = num_kept(spec, memory)
        # Of a model no more is known than what decides the bytes of its KV.
        shape = ModelConfig(
            architecture="",
            vocab_size=1,
            hidden_size=spec.head_dim,
            intermediate_size=spec.head_dim,
            num_layers=spec.num_layers,
            num_heads=spec.num_kv_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rms_norm_eps=0.0,
            rope_theta=1.0,
            max_position_embeddings=num_blocks * spec.block_size,
        )
        is_fp8 = spec.dtype == torch.float8_e4m3fn
        config = EngineConfig(
            block_size=spec.block_size,
            num_blocks=num_blocks,
            dtype="float32" if is_fp8 else str(spec.dtype).removeprefix("torch."),
            kv_dtype="fp8" if is_fp8 else "auto",
            tensor_parallel=spec.ranks,
            allocate=lambda count, block_bytes: segment,
            kv_file=segment.path if segment is not None and spec.ranks > 1 else None,
        )
        ranks = _Ranks(spec.ranks)
        nothing: LoadedModel = LoadedModel(None, shape, fingerprint, ranks, 0, 0, None, spec.scales)  # type: ignore[arg-type]
        self.lineage = Lineage(_REMEMBERED * num_blocks)
        self._kept = KeptPool(num_blocks, make_policy, self.lineage.arrival)
        super().__init__(nothing, config, self._kept)
        self.on_over: Callable[[str, int], None] = lambda request_id, num_blocks: None
        self.on_used: Callable[[list[bytes]], None] = lambda hashes: None
        self.asked: dict[str, Asked] = {}  # by request, before it is looked up
        self.popular = Popular()
        self._metrics = metrics

    def reserve(self, request: Request, *, prefix_tokens: int | None = None, hold: bool = False) -> Reservation | None:
        """See `Engine.reserve`."""
        self._kept.coming = request.block_hashes
        return super().reserve(request, prefix_tokens=prefix_tokens, hold=hold)

    def _make_runner(self) -> None:
        """Nothing is computed here."""

    def commit_prefix(self, request_id: str, num_blocks: int, *, from_tier: bool = False) -> bool:
        """So many blocks have landed: they can be found from now on."""
        kept = super().commit_prefix(request_id, num_blocks)
        self.abort(request_id)
        self.on_over(request_id, num_blocks if kept else 0)
        return kept

    def recompute(self, request_id: str) -> bool:
        """Nothing has landed, and nothing will."""
        self.abort(request_id)
        self.on_over(request_id, 0)
        return True

    def detach(self, request_id: str, *, then_wait: bool) -> list[int]:
        """See `Engine.detach`. Nothing is waited for."""
        blocks = super().detach(request_id, then_wait=False)
        self.on_over(request_id, 0)
        return blocks

    def hold_cached(self, request: Request) -> int:
        """See `Engine.hold_cached`. Counts what was there."""
        tokens = super().hold_cached(request)
        size = self.kv_cache.spec.block_size
        asked = self.asked.pop(request.request_id, None) or Asked(0, len(request.prompt_token_ids))
        first, end = asked.start // size, asked.end // size
        self._metrics.looked_up(max(0, min(end, tokens // size) - first), asked.promoted, max(0, end - first))
        if tokens:
            hashes = self.hashes_of(request)[: tokens // size]
            self._kept.used(hashes)
            self.on_used(hashes)
            self.popular.used(hashes[-1], tokens)
        return tokens

    def orphaned_blocks(self, detached: list[int]) -> int:
        """See `Engine.orphaned_blocks`. What is pinned is held for nobody."""
        return super().orphaned_blocks([*detached, *self._kept.pinned_here.values()])

    def change_pins(self, pinned: Sequence[bytes], ended: Sequence[bytes]) -> None:
        """Blocks that are not to be given up from now on, here or still to come, and those that may be again."""
        self._kept.unpin(ended)
        self._kept.pin(pinned)

    @property
    def pinned_here(self) -> Mapping[bytes, int]:
        """Pinned blocks, by hash, that are here."""
        return self._kept.pinned_here

    def forget(self) -> tuple[list[bytes], list[KvEvent]]:
        """Nothing can be found any more: what could be, and what is to be told."""
        hashes = self.snapshot_hashes()
        self.clear_cache()
        return hashes, self.drain_events()

    def pin(self, request: Request) -> list[int]:
        """Holds the leading blocks of a request by hashes that are here, until `release`; which ones."""
        super().hold_cached(request)
        return self.held_blocks(request.request_id)

    def commit_and_pin(self, request_id: str, num_blocks: int, held: Request) -> None:
        """As `commit_prefix`; the blocks are held by the other request at once, until its `release`."""
        self.commit_prefix(request_id, num_blocks)
        self.pin(held)

    def room_behind(self, hashes: Sequence[bytes]) -> int:
        """How many blocks can come behind these, which are here."""
        here = hashes[: self._pool.match(hashes)]
        return max(0, self._pool.num_free - self._pool.num_idle(here) - 1)  # one for what is computed, as in prompts

    def hashes_of(self, request: Request) -> list[bytes]:
        """Of the request's full blocks. Any thread."""
        if request.block_hashes:
            return request.block_hashes
        spec = self.kv_cache.spec
        root = root_hash(
            fingerprint=self.fingerprint, layout=spec.layout, block_size=spec.block_size, salt=request.cache_salt
        )
        return block_hashes(request.prompt_token_ids, spec.block_size, root)

    def num_leading(self, hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks are here."""
        return self._pool.match(hashes)


def num_kept(spec: KVCacheSpec, memory: int) -> int:
    """Blocks for which `memory` bytes are enough. Raises ConfigError if there are none."""
    block_bytes = spec.ranks * spec.block_bytes
    if memory < block_bytes:
        raise ConfigError(f"kv_memory_host: a block of this model's KV has {block_bytes} bytes: give it more memory")
    return memory // block_bytes


def copy_of(request_id: str, hashes: Sequence[bytes], block_size: int) -> Request:
    """The request that has these blocks copied. The last token of a request is never taken from a cache."""
    return Request(
        request_id=request_id,
        prompt_token_ids=[0] * (len(hashes) * block_size + 1),
        sampling=SamplingParams(max_tokens=0),
        block_hashes=list(hashes),
    )
