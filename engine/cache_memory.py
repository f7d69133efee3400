"""Where the memory of a KV cache comes from: it is of this process alone, or shared, with the caches of other ranks."""

import mmap
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from engine.kv_cache import KVCache, KVCacheSpec
from engine.loaded import LoadedModel

if TYPE_CHECKING:
    from engine.engine import EngineConfig

_KV_MEMORY = 1 << 30  # bytes, on CPU


class KVMemory(Protocol):
    """Memory on CPU for a KV cache. It can be given back and taken again, at the same address and full of zeros."""

    @property
    def buffer(self) -> Any:
        """Writable bytes."""
        ...

    @property
    def path(self) -> str | None:
        """File of it that other processes can map; None: there is none."""
        ...

    def release(self) -> None:
        """Gives the pages back. What is written meanwhile takes them again."""
        ...

    def reserve(self) -> None:
        """Takes all pages again. Raises what the kind of memory raises if there are none."""
        ...


class PrivateMemory:
    """`size` bytes of this process alone."""

    def __init__(self, size: int) -> None:
        self.buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.path = None

    def release(self) -> None:
        """See `KVMemory`."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def reserve(self) -> None:
        """See `KVMemory`. Pages come when they are written to, and the kernel promises them all."""


class RankMemory:
    """Part `rank`, of `size` bytes, of a file with the caches of all ranks; rank 0 gives it back and takes it."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._mapping = mmap.mmap(file.fileno(), 0)
        self.buffer = memoryview(self._mapping)[rank * size : (rank + 1) * size]
        self.path = path

    def release(self) -> None:
        """See `KVMemory`."""

    def reserve(self) -> None:
        """See `KVMemory`."""


def cache_size(loaded: LoadedModel, config: "EngineConfig") -> tuple[KVCacheSpec, int]:
    """Shape and number of a rank's blocks."""
    spec = KVCacheSpec.of(loaded.config, config.block_size, config.cache_dtype, loaded.group.size, loaded.kv_scales)
    if config.num_blocks is not None:
        return spec, config.num_blocks
    return spec, (config.kv_memory or _KV_MEMORY) // spec.block_bytes


def with_shared_memory(loaded: LoadedModel, config: "EngineConfig") -> "EngineConfig":
    """With memory in which the caches of several ranks lie side by side, if `config.allocate` has any."""
    if loaded.group.size == 1 or config.allocate is None:
        return config
    spec, num_blocks = cache_size(loaded, config)
    memory = config.allocate(spec.ranks * num_blocks, spec.block_bytes)
    if memory is None or memory.path is None:
        return config
    return msgspec.structs.replace(
        config, num_blocks=num_blocks, allocate=lambda count, size: memory, kv_file=memory.path
    )


def make_caches(
    rank: int, config: "EngineConfig", spec: KVCacheSpec, num_blocks: int
) -> tuple[KVMemory | None, KVCache, KVCache]:
    """(memory, the rank's cache, pages of all ranks); without memory of its own the cache allocates it on a device.

    The last is the rank's cache, too, unless this is rank 0 and others' lie beside it.
    """
    memory = config.allocate(num_blocks, spec.block_bytes) if config.allocate is not None else None
    if config.kv_file is not None and rank:
        memory = RankMemory(config.kv_file, rank, num_blocks * spec.block_bytes)
    if memory is None and config.device == "cpu":
        memory = PrivateMemory(num_blocks * spec.block_bytes)
    buffer = None if memory is None else memory.buffer
    cache = KVCache(spec, num_blocks, buffer, config.device)
    all_ranks = config.kv_file is not None and not rank
    return memory, cache, KVCache(spec, spec.ranks * num_blocks, buffer) if all_ranks else cache
