"""What the gateway counts. The books balance: received = ok + client_error + server_error + cancelled + running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.gateway.rates import LIMITED

OUTCOMES = ("ok", "client_error", "server_error", "cancelled")
REFUSALS = ("key", "admin", *LIMITED)
_LATENCY = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)  # seconds


class Ended(NamedTuple):
    """A request that has ended. Times in seconds, `at` of the monotonic clock; None: it had too few tokens."""

    at: float
    outcome: str
    ttft: float | None
    tpot: float | None  # of the slowest choice


class GatewayMetrics:
    """The gateway's registry. One HTTP request counts once, whatever its prompts and choices."""

    def __init__(self) -> None:
        self.num_running = 0
        self.on_ended: Callable[[Ended], None] = lambda _request: None
        self.registry = registry = CollectorRegistry()
        self.received = Counter("tandem_requests_received", "Generation requests that arrived", registry=registry)
        self.requests = Counter(
            "tandem_requests", "Generation requests that ended, by outcome", ["outcome"], registry=registry
        )
        self.refused = Counter(
            "tandem_requests_refused",
            "Requests turned away before anything was read of them",
            ["why"],
            registry=registry,
        )
        running = Gauge("tandem_requests_running", "Generation requests under way", registry=registry)
        running.set_function(lambda: self.num_running)
        busy = Gauge(
            "tandem_gateway_loop_seconds",
            "CPU of the thread that reads requests and streams answers",
            registry=registry,
        )
        busy.set_function(time.thread_time)  # asked on that thread
        # By model, as follows: an alias counts as what it stands for.
        self.choices = Counter(
            "tandem_choices", "Choices of accepted requests (prompts x n)", ["model"], registry=registry
        )
        self.turned_away = Counter(
            "tandem_choices_turned_away",
            "Choices of valid requests for which no worker was known yet, or that were more than max_in_flight",
            ["model"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "tandem_request_prompt_tokens", "Prompt tokens of accepted requests", ["model"], registry=registry
        )
        self.completion_tokens = Counter(
            "tandem_request_completion_tokens", "Tokens generated", ["model"], registry=registry
        )
        self.answers = Counter("tandem_answers", "Choices that were completed", ["model"], registry=registry)
        self.answer_tokens = Counter("tandem_answer_tokens", "Tokens of those", ["model"], registry=registry)
        self.moved = Counter("tandem_requests_moved", "Sequences placed again after a loss", registry=registry)
        self.retries = Counter("tandem_retries", "Placements and attempts that failed, tried again", registry=registry)
        self.retries_refused = Counter(
            "tandem_retries_refused", "Tries again that the retry budget did not allow", registry=registry
        )
        self.ttft = Histogram(
            "tandem_ttft_seconds", "From arrival to the first token", ["model"], registry=registry, buckets=_LATENCY
        )
        self.tpot = Histogram(
            "tandem_tpot_seconds",
            "Mean time per output token after the first, of each finished choice",
            ["model"],
            registry=registry,
            buckets=_PER_TOKEN,
        )
        self.itl = Histogram(
            "tandem_itl_seconds", "Gap between two tokens", ["model"], registry=registry, buckets=_PER_TOKEN
        )
        self.e2e = Histogram(
            "tandem_e2e_seconds",
            "From arrival to the end of good requests",
            ["model"],
            registry=registry,
            buckets=_LATENCY,
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        for why in REFUSALS:
            self.refused.labels(why)

    def serves(self, models: Iterable[str]) -> None:
        """Begins at 0 for each of these: so the planner knows of a model for which nobody has asked yet."""
        for model in models:
            self.choices.labels(model)
            self.turned_away.labels(model)


class RequestRecord:
    """The books of one request, from arrival to `close`, which counts it exactly once."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self.outcome: str | None = None  # set by whoever knows better than the HTTP status
        self.charge: Callable[[int], None] = lambda tokens: None  # to whoever sent the request
        self.arrival = time.monotonic()
        self._metrics = metrics
        self._model = ""  # until it is accepted
        self._closed = False
        self._ttft: float | None = None
        self._tpot: float | None = None
        self._times: dict[int, tuple[float, float, int]] = {}  # choice -> times of first and last token, tokens
        metrics.received.inc()
        metrics.num_running += 1

    def accepted(self, model: str, prompt_tokens: int, choices: int) -> None:
        """The request is valid and starts."""
        self.charge(prompt_tokens)
        self._model = model
        self._metrics.prompt_tokens.labels(model).inc(prompt_tokens)
        self._metrics.choices.labels(model).inc(choices)

    def tokens(self, choice: int, total: int) -> None:
        """A choice has `total` tokens now."""
        now = time.monotonic()
        first, last, known = self._times.get(choice, (now, now, 0))
        new = total - known
        if new <= 0:
            return
        if not self._times:
            self._ttft = now - self.arrival
            self._metrics.ttft.labels(self._model).observe(self._ttft)
        if known:
            for _ in range(new):  # tokens that come together share the gap
                self._metrics.itl.labels(self._model).observe((now - last) / new)
        self.charge(new)
        self._metrics.completion_tokens.labels(self._model).inc(new)
        self._times[choice] = (first, now, total)

    def finished(self, choice: int) -> None:
        """A choice is complete."""
        first, last, total = self._times.get(choice, (0.0, 0.0, 0))
        self._metrics.answers.labels(self._model).inc()
        self._metrics.answer_tokens.labels(self._model).inc(total)
        if total > 1:
            tpot = (last - first) / (total - 1)
            self._metrics.tpot.labels(self._model).observe(tpot)
            self._tpot = max(self._tpot or 0.0, tpot)

    def failed(self, status: int) -> None:
        """The request ends with an error of this HTTP status, whatever went out before."""
        self.outcome = _outcome_of(status)

    def moved(self, times: int) -> None:
        """Sequences of the request were placed again so many times."""
        self._metrics.moved.inc(times)

    def close(self, status: int | None) -> str:
        """The request has ended; `status` is the HTTP status that went out, if any did. Returns the outcome."""
        outcome = self.outcome or _outcome_of(status)
        if self._closed:
            return outcome
        self._closed = True
        self._metrics.requests.labels(outcome).inc()
        self._metrics.num_running -= 1
        self._metrics.on_ended(Ended(time.monotonic(), outcome, self._ttft, self._tpot))
        if outcome == "ok":
            self._metrics.e2e.labels(self._model).observe(time.monotonic() - self.arrival)
        return outcome


def _outcome_of(status: int | None) -> str:
    if status is None:
        return "cancelled"
    return "ok" if status < 400 else "client_error" if status < 500 else "server_error"
