"""What a device's memory goes to and how much of it is left for the KV cache: arithmetic in bytes, without torch."""

import re
from pathlib import Path

import msgspec

_RESERVED = 0.02  # share of a device that stays free: for steps unlike those tried at start, and for fragmentation


class DoesNotFit(ValueError):
    """The model or its KV cache needs more memory than there is; the message has numbers and says what to change."""


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory of a device went when the largest steps had been tried with a model."""

    total: int
    elsewhere: int  # in use before the model was loaded: other processes, the driver
    weights: int
    work: int  # largest step, CUDA graphs, libraries

    @property
    def reserve(self) -> int:
        """What stays free."""
        return int(_RESERVED * self.total)

    @property
    def left(self) -> int:
        """What the KV cache can have; 0 or less if nothing."""
        return self.total - self.elsewhere - self.weights - self.work - self.reserve

    def num_blocks(self, block_bytes: int, left: int) -> int:
        """KV blocks that fit into `left`: what this device has left, or another rank's if less. Raises DoesNotFit."""
        if left < block_bytes:
            raise DoesNotFit(
                f"no memory is left for the KV cache: {self}. Lower --max-batched-tokens or --max-running, take a "
                "smaller model or dtype, or stop what else uses the device"
            )
        return left // block_bytes

    def __str__(self) -> str:
        return (
            f"of the device's {gib(self.total)}, weights take {gib(self.weights)}, the largest step and CUDA graphs "
            f"{gib(self.work)}, others {gib(self.elsewhere)}, and {gib(self.reserve)} stay free"
        )


def gib(size: int) -> str:
    """A size for people."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size / (1 << 10):,.1f} KiB"


def describe_cache(num_blocks: int, block_size: int, block_bytes: int) -> str:
    """One line about a KV cache."""
    return f"KV cache: {num_blocks * block_size:,} tokens ({gib(num_blocks * block_bytes)})"


def require_weights(needed: int, free: int, total: int) -> None:
    """Raises DoesNotFit unless weights of `needed` bytes fit into what is free of a device."""
    if needed > free:
        raise DoesNotFit(
            f"the weights need {gib(needed)}; the device has {gib(free)} of {gib(total)} free. Take a smaller model, "
            "dtype or quantisation, spread it over several devices, or stop what else uses this one"
        )


def require_cache(needed: int, free: int, total: int) -> None:
    """Raises DoesNotFit unless a KV cache of `needed` bytes fits into what is free of a device."""
    if needed > free:
        raise DoesNotFit(
            f"the KV cache needs {gib(needed)}; beside the model the device has {gib(free)} of {gib(total)} free. "
            "Lower --kv-memory or --kv-blocks, or leave them out: then it gets what is free"
        )


def host_memory() -> tuple[int, int]:
    """(bytes that programs can still have, bytes of all) of this machine."""
    kib = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    return int(kib["MemAvailable"]) << 10, int(kib["MemTotal"]) << 10


def require_host_cache(needed: int, free: int, total: int) -> None:
    """Raises DoesNotFit unless KV caches of `needed` bytes fit into what is free of the machine's memory."""
    if needed > free:
        raise DoesNotFit(
            f"the KV cache needs {gib(needed)}; the machine has {gib(free)} of {gib(total)} free. "
            "Lower --kv-memory or --kv-blocks, or stop what else uses the memory"
        )


def model_len(wanted: int | None, longest: int, num_blocks: int, block_size: int, block_bytes: int) -> int:
    """Tokens of the longest request: `wanted`, or what the model was made for (`longest`) as far as the cache goes.

    Raises DoesNotFit if the cache has no room for what was wanted, or for anything.
    """
    capacity = num_blocks * block_size
    if num_blocks < 1:
        raise DoesNotFit(f"the KV cache needs at least one block of {gib(block_bytes)}: give it more memory")
    if wanted is None:
        return min(longest, capacity)
    length = min(wanted, longest)
    if length > capacity:
        needed = -(-length // block_size)
        raise DoesNotFit(
            f"--max-model-len {length} needs a KV cache of {gib(needed * block_bytes)}; there is room for {capacity} "
            f"tokens ({gib(num_blocks * block_bytes)}). Lower --max-model-len or give the cache more memory"
        )
    return length


def trial_prompts(max_batched_tokens: int, max_running: int, longest: int) -> list[list[int]]:
    """Lengths of the prompts of each step to try: one token, the longest chunk, and as many prompts as run at once.

    No prompt is longer than `longest` tokens.
    """
    share = max(1, min(max_batched_tokens // max_running, longest))
    return [[1], [max(1, min(max_batched_tokens, longest))], [share] * max_running]


def trial_blocks(prompts: list[list[int]], block_size: int) -> int:
    """KV blocks in which each of the steps can be computed, and the next two tokens of its prompts."""
    # While a prompt is admitted, one block for each running one stays free.
    return max(sum(-(-(length + 2) // block_size) + 1 for length in lengths) for lengths in prompts)
