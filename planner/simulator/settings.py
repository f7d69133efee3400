"""What a simulated cluster is made of."""

from dataclasses import dataclass, field

from engine.request import TIERS
from planner.offer import Offer
from planner.simulator.control_plane import ControlCosts
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.timing import Timing
from planner.window import Role


@dataclass(frozen=True)
class KvSettings:
    """Of the KV service. Tokens that its tiers hold."""

    host_tokens: int = 0  # 0: there is no KV service
    disk_tokens: int = 0  # beneath host memory; 0: none
    redis_tokens: int = 0  # likewise
    policy: str = "lru"  # of host memory and disk: of `kv_transfer.tiers.policies`, or OPTIMUM

    @property
    def tiers(self) -> list[str]:
        """Those that there are, nearest first; none without host memory."""
        tokens = self.host_tokens, self.disk_tokens, self.redis_tokens
        return [tier for tier, size in zip(TIERS, tokens, strict=False) if size] if self.host_tokens else []


@dataclass(frozen=True)
class Settings:
    """The engine's defaults on CUDA, the router's, and the delays between processes in seconds."""

    workers: int = 16
    prefill_workers: int = 0  # of them; the others decode. 0: all are aggregated
    block_size: int = BLOCK_SIZE  # tokens; as the trace's. Of another than this there are neither tiers nor the oracle
    kv_tokens: int = 800_000  # of each worker's pool: what 8B of weights leave of an H200's memory
    max_batched_tokens: int = 1280
    decode_prompt_tokens: int = 128  # of prompts, in a step with decodes, on a decode worker
    max_running: int = 256
    max_overtaking: int = 4
    local_prefill_tokens: int = 32
    fetch_tokens: int = 256
    routers: int = 1
    control: ControlCosts | None = None  # what gateways and routers take; None: nothing
    gateways: int = 0  # that share the requests, which take them what `timing` says; 0: enough of them
    hop: float = 0.001  # gateway to worker, worker to worker, gateway to router
    event_delay: float = 0.005  # from a worker's step to the routers' indexes
    lost_events: float = 0.0  # share of the messages of KV events that one router misses
    load_seconds: float = 0.5  # between two words of a worker's load
    peer_fetch: bool = True  # workers send to each other what they have cached; the KV service always does
    kv: KvSettings = field(default_factory=KvSettings)
    shared_load: bool = True  # routers tell each other what they booked
    slots: int = 0  # most workers that may be there at once, where a planner adds some; 0: `workers`
    start_seconds: float = 120.0  # until a new worker, or one that failed, is ready
    flip_seconds: float = 2.0  # that a change of roles takes, once nothing runs any more
    failures: float = 0.0  # of a worker, in an hour
    detect_seconds: float = 0.5  # until a failure is noticed and its requests are placed again
    seed: int = 0
    timing: Timing = field(default_factory=Timing)
    gpus: int = 1  # of each worker
    prefill_offer: Offer | None = None  # what workers that only prefill are; None: as the others

    def offer(self, role: Role) -> Offer:
        """What a worker of this role is."""
        if role == "prefill" and self.prefill_offer is not None:
            return self.prefill_offer
        return Offer(
            gpus=self.gpus,
            timing=self.timing,
            kv_tokens=self.kv_tokens,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
        )
