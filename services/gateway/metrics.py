"""What the gateway counts. The books balance: received = ok + client_error + server_error + cancelled + running."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OUTCOMES = ("ok", "client_error", "server_error", "cancelled")
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds


class GatewayMetrics:
    """The gateway's registry. One HTTP request counts once, whatever its prompts and choices."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.received = Counter("tandem_requests_received", "Generation requests that arrived", registry=registry)
        self.requests = Counter(
            "tandem_requests", "Generation requests that ended, by outcome", ["outcome"], registry=registry
        )
        self.running = Gauge("tandem_requests_running", "Generation requests under way", registry=registry)
        self.choices = Counter("tandem_choices", "Choices of accepted requests (prompts x n)", registry=registry)
        self.prompt_tokens = Counter(
            "tandem_request_prompt_tokens", "Prompt tokens of accepted requests", registry=registry
        )
        self.completion_tokens = Counter("tandem_request_completion_tokens", "Tokens generated", registry=registry)
        self.moved = Counter("tandem_requests_moved", "Sequences placed again after a loss", registry=registry)
        self.retries = Counter("tandem_retries", "Placements and attempts that failed, tried again", registry=registry)
        self.retries_refused = Counter(
            "tandem_retries_refused", "Tries again that the retry budget did not allow", registry=registry
        )
        self.ttft = Histogram(
            "tandem_ttft_seconds", "From arrival to the first token", registry=registry, buckets=_LATENCY
        )
        self.tpot = Histogram(
            "tandem_tpot_seconds",
            "Mean time per output token after the first, of each finished choice",
            registry=registry,
            buckets=_PER_TOKEN,
        )
        self.itl = Histogram("tandem_itl_seconds", "Gap between two tokens", registry=registry, buckets=_PER_TOKEN)
        self.e2e = Histogram(
            "tandem_e2e_seconds", "From arrival to the end of good requests", registry=registry, buckets=_LATENCY
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)


class RequestRecord:
    """The books of one request, from arrival to `close`, which counts it exactly once."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.outcome: str | None = None  # set by whoever knows better than the HTTP status
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._closed = False
        self._times: dict[int, tuple[float, float, int]] = {}  # choice -> times of first and last token, tokens
        metrics.received.inc()
        metrics.running.inc()

    def accepted(self, prompt_tokens: int, choices: int) -> None:
        """The request is valid and starts."""
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.choices.inc(choices)

    def tokens(self, choice: int, total: int) -> None:
        """A choice has `total` tokens now."""
        now = time.monotonic()
        first, last, known = self._times.get(choice, (now, now, 0))
        new = total - known
        if new <= 0:
            return
        if not self._times:
            self._metrics.ttft.observe(now - self._arrival)
        if known:
            for _ in range(new):  # tokens that come together share the gap
                self._metrics.itl.observe((now - last) / new)
        self._metrics.completion_tokens.inc(new)
        self._times[choice] = (first, now, total)

    def finished(self, choice: int) -> None:
        """A choice is complete."""
        first, last, total = self._times.get(choice, (0.0, 0.0, 0))
        if total > 1:
            self._metrics.tpot.observe((last - first) / (total - 1))

    def moved(self, times: int) -> None:
        """Sequences of the request were placed again so many times."""
        self._metrics.moved.inc(times)

    def close(self, status: int | None) -> None:
        """The request has ended; `status` is the HTTP status that went out, if any did."""
        if self._closed:
            return
        self._closed = True
        outcome = self.outcome or _outcome_of(status)
        self._metrics.requests.labels(outcome).inc()
        self._metrics.running.dec()
        if outcome == "ok":
            self._metrics.e2e.observe(time.monotonic() - self._arrival)


def _outcome_of(status: int | None) -> str:
    if status is None:
        return "cancelled"
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
