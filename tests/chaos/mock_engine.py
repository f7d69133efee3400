"""A real engine whose model is a hash: each next token is a function of all KV bytes read back from its pages.

The KV of a token is computed from the token and the KV of the one before it, as its page holds it. So a wrong, stale,
torn or missing page anywhere before gives a wrong token, and goes on giving wrong ones.
"""

import hashlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from engine.cache_memory import KVMemory
from engine.config import ModelConfig
from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCache
from engine.loaded import LoadedModel
from engine.parallel.group import ALONE
from engine.runner import OnLayers, StepResult
from engine.sampler import Sampled
from engine.step import Entry

BLOCK, LAYERS, HEAD_DIM, VOCABULARY = 4, 3, 32, 1 << 30
ROW = 2 * HEAD_DIM * 4  # bytes of one token in one layer
FINGERPRINT = "chaos"


def kv_row(layer: int, token: int, before: bytes) -> bytes:
    """What the model would have computed: KV of one token in one layer; `before` is the row of the token before."""
    digest = hashlib.blake2b(before, digest_size=32, salt=layer.to_bytes(16, "big"), person=token.to_bytes(16, "big"))
    return digest.digest() * (ROW // 32)


def next_token(kv: bytes) -> int:
    """The token that follows KV [tokens, layers, ROW]."""
    return xxhash.xxh64_intdigest(kv) % VOCABULARY


def reference(prompt: list[int], max_tokens: int) -> list[int]:
    """The output of a request that shares its memory with nobody."""
    rows, kv, output = [b""] * LAYERS, bytearray(), []
    for token in prompt:
        rows = [kv_row(layer, token, rows[layer]) for layer in range(LAYERS)]
        kv += b"".join(rows)
    while len(output) < max_tokens:
        output.append(next_token(bytes(kv)))
        rows = [kv_row(layer, output[-1], rows[layer]) for layer in range(LAYERS)]
        kv += b"".join(rows)
    return output


class HashRunner:
    """Computes steps on the pages of `cache`; each layer of a step takes `layer_seconds`."""

    def __init__(self, cache: KVCache, layer_seconds: float) -> None:
        # [blocks, layers, page, ROW], a view
        self._pages: npt.NDArray[np.uint8] = cache.tensor.flatten(3).view(torch.uint8).numpy()
        self._layer_seconds = layer_seconds
        self._block_size = cache.spec.block_size

    def settle(self) -> None:
        """Nothing goes on behind `run`."""

    def run(
        self,
        entries: Sequence[Entry],
        on_layers: OnLayers | None = None,
        foresee: Callable[[], Sequence[Entry]] = lambda: (),
        listen: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """As `engine.runner.Runner.run`."""
        for layer in range(LAYERS):
            for entry in entries:
                self._compute(entry, layer)
            time.sleep(self._layer_seconds)
            if on_layers is not None:
                on_layers(range(layer, layer + 1), entries)
        result = StepResult()
        for entry in entries:
            if entry.samples and entry.sequence.request.sampling.max_tokens:
                kv = self._pages[entry.sequence.block_ids].swapaxes(1, 2).reshape(-1, LAYERS, ROW)[: entry.end]
                result.sampled[entry.sequence.request_id] = Sampled(next_token(kv.tobytes()), None)
        return result

    def _compute(self, entry: Entry, layer: int) -> None:
        blocks, size = entry.sequence.block_ids, self._block_size
        before = b""
        if entry.start:
            last = entry.start - 1
            before = self._pages[blocks[last // size], layer, last % size].tobytes()
        for position in range(entry.start, entry.end):
            before = kv_row(layer, entry.sequence.token_ids[position], before)
            self._pages[blocks[position // size], layer, position % size] = np.frombuffer(before, np.uint8)


class MockEngine(Engine):
    """Everything of the engine but its model."""

    def __init__(
        self,
        num_blocks: int,
        layer_seconds: float,
        allocate: Callable[[int, int], KVMemory | None] | None = None,
        block_size: int = BLOCK,
    ) -> None:
        self._layer_seconds = layer_seconds
        shape = ModelConfig(
            architecture="chaos",
            vocab_size=VOCABULARY,
            hidden_size=HEAD_DIM,
            intermediate_size=HEAD_DIM,
            num_layers=LAYERS,
            num_heads=1,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            max_position_embeddings=1024,
        )
        loaded = LoadedModel(None, shape, FINGERPRINT, ALONE, 0, 0, None)  # type: ignore[arg-type]
        config = EngineConfig(block_size=block_size, num_blocks=num_blocks, max_batched_tokens=48, allocate=allocate)
        super().__init__(loaded, config)

    def _make_runner(self) -> HashRunner:  # type: ignore[override]
        return HashRunner(self.kv_cache, self._layer_seconds)

    @property
    def held_blocks_of_anybody(self) -> int:
        """Blocks that are not free; the pool's books balance."""
        self._pool.check()
        return self._pool.num_blocks - self._pool.num_free
