"""What a simulated cluster is made of."""

from dataclasses import dataclass, field

from bench.replay.job import BLOCK_SIZE
from bench.replay.timing import Timing


@dataclass(frozen=True)
class Settings:
    """The engine's defaults on CUDA, the router's, and the delays between processes in seconds."""

    workers: int = 16
    prefill_workers: int = 0  # of them; the others decode. 0: all are aggregated
    kv_tokens: int = 800_000  # of each worker's pool: what 8B of weights leave of an H200's memory
    max_batched_tokens: int = 1280
    decode_prompt_tokens: int = 128  # of prompts, in a step with decodes, on a decode worker
    max_running: int = 256
    max_overtaking: int = 4
    local_prefill_tokens: int = 32
    fetch_tokens: int = 256
    routers: int = 1
    hop: float = 0.001  # gateway to worker, worker to worker, gateway to router
    event_delay: float = 0.005  # from a worker's step to the routers' indexes
    lost_events: float = 0.0  # share of the messages of KV events that one router misses
    load_seconds: float = 0.5  # between two words of a worker's load
    shared_load: bool = True  # routers tell each other what they booked
    seed: int = 0
    timing: Timing = field(default_factory=Timing)

    @property
    def pool_blocks(self) -> int:
        """Of each worker."""
        return self.kv_tokens // BLOCK_SIZE
