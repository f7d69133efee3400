"""What one load run does: the settings that flags fill and that every report repeats."""

from typing import Any, Literal

import msgspec

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
Arrival = Literal["poisson", "constant", "gamma", "ramp", "trace"]


class WorkloadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Lengths are in tokens; a length is a distribution as `bench.workloads.lengths` reads it."""

    name: str = "random"
    data: str = ""  # file of the workloads that read one; empty: the sample that Tandem ships
    input_len: str = "256"
    output_len: str = "64"
    prefix_len: int = 128  # shared-prefix: tokens of each group's prefix; multi-turn: of the system prompt
    groups: int = 8
    turns: str = "3"  # multi-turn: turns of a conversation
    think: str = "1"  # multi-turn: seconds between an answer and the next question
    speed: float = 1.0  # traces: 2 replays twice as fast
    length_scale: float = 1.0  # traces: 1/16 divides all lengths by 16, blocks too
    limit: int = 0  # traces: no more requests than this; 0: all
    window: str = ""  # traces: "10m-20m", the part to replay
    mix: str = ""  # unruly clients: "slow=5%,disconnect=10%,cancel=5%,bad=5%"
    slow_rate: float = 2000.0  # slow clients: bytes a second that they read
    leave_after: str = "1-16"  # disconnecting clients: tokens that they wait for before they hang up


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One load run. Times are in seconds, rates in requests per second."""

    url: str
    model: str = ""
    endpoint: Endpoint = "completions"
    tokenizer: str = ""  # path of a tokenizer.json
    chat_overhead: int = -1  # tokens that the chat template adds to one message; -1: not known
    workload: WorkloadConfig = WorkloadConfig()
    arrival: Arrival = "poisson"
    rate: float | None = None  # open loop
    burstiness: float = 1.0  # gamma: shape of the gaps; below 1 burstier than Poisson, above 1 calmer
    ramp_to: float | None = None  # ramp: rate at the end
    concurrency: int | None = None  # closed loop: conversations in flight
    num_requests: int | None = None
    duration: float | None = None
    warmup: int = 0  # first requests, sent and not counted
    seed: int = 0
    timeout: float = 600.0  # of one request
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra_body: dict[str, Any] = {}
    workers: int = 1  # load processes
    max_send_lag_ms: float = 10.0  # p99 above it: the run is not valid
    keep_text: bool = False

    @property
    def replays(self) -> bool:
        """Whether conversations start at the timestamps of a trace."""
        return self.concurrency is None and self.arrival == "trace"
