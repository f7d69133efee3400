"""What is kept of each request."""

import msgspec

OK = ""  # `Record.error` of a request that went as it should
INTERRUPTED = "interrupted"  # ... that was under way when the run was ended


class Record(msgspec.Struct, kw_only=True):
    """One request from the client's side. Times are seconds since the start of the run; -1 is "did not happen".

    `chunks` are the times at which text arrived, one for each message of the server that carried any, seconds since
    `sent`. A message may carry several tokens; `completion_tokens` is the number that the server's usage tells.
    """

    id: int  # position in the plan of the run
    conversation: int = 0
    turn: int = 0
    client: str = "normal"  # normal, slow, disconnect, cancel, bad
    warmup: bool = False
    scheduled: float = -1.0  # when it should have been sent
    sent: float = -1.0  # when it was handed to the socket
    end: float = -1.0  # when the answer was complete, or failed
    chunks: list[float] = []
    input_tokens: int = 0  # tokens of the prompt as made; 0: not known
    output_tokens: int = 0  # tokens that were asked for; 0: as many as the model likes
    shared_tokens: int = -1  # leading tokens that an endless cache would hold; -1: the workload does not say
    prompt_tokens: int = -1  # usage of the server
    completion_tokens: int = -1
    cached_tokens: int = -1
    status: int = 0  # HTTP status; 0: none came
    error: str = OK  # kind of error
    detail: str = ""  # what the server or the system said of it
    retry_after: float = -1.0  # seconds, of a 429 or 503
    finish_reason: str = ""
    prompt_digest: str = ""
    text: str = ""  # the answer, where it is kept

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text; -1 without any."""
        return self.chunks[0] if self.chunks else -1.0

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the number of messages with text."""
        return self.completion_tokens if self.completion_tokens >= 0 else len(self.chunks)

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first: (last - first) / (tokens - 1); -1 below two tokens."""
        if self.tokens < 2 or len(self.chunks) < 2:
            return -1.0
        return (self.chunks[-1] - self.chunks[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals of text (ITL)."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end - self.sent


class LagSamples(msgspec.Struct, kw_only=True):
    """How late the load generator itself was, in milliseconds."""

    send: list[float] = []  # due to sent, one a request
    loop: list[float] = []  # lateness of a 10 ms timer in the loop that reads the answers


class RunResult(msgspec.Struct, kw_only=True):
    """All that a run left behind."""

    started_at: float  # wall clock, seconds since the epoch
    wall_seconds: float
    records: list[Record]
    lag: LagSamples
    interrupted: bool = False
    planned: int = 0  # requests that were to be sent; 0: as many as fit the duration
