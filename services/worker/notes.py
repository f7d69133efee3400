"""What gateways are to be told of requests beside their tokens: what they spent time on, and who did not deliver."""

from __future__ import annotations

from engine.request import Stage, TokenOutput
from engine.step import Step
from services import tracing


class Notes:
    """Kept by request until they go out with its next output. Event loop and engine thread both write."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._stages: dict[str, list[tuple[str, float, float, bool]]] = {}

    def prefill_failed(self, key: str) -> None:
        """The request's prefill worker did not deliver."""
        self._failed.add(key)

    def spent(self, key: str, stage: str, begin: float, end: float, *, elsewhere: bool = False) -> None:
        """The request spent this time (monotonic seconds) on a stage, here or on its prefill worker."""
        self._stages.setdefault(key, []).append((stage, begin, end, elsewhere))

    def forget(self, key: str) -> None:
        """Nobody is to be told any more."""
        self._failed.discard(key)
        self._stages.pop(key, None)

    def take_failed(self, key: str) -> bool:
        """Whether its prefill worker did not deliver. Tells it once."""
        if failed := key in self._failed:
            self._failed.remove(key)
        return failed

    def take_stages(self, output: TokenOutput, step: Step, traceparent: str, arrived: float, now: float) -> list[Stage]:
        """All up to the request's first output; what was computed here becomes spans, too. Tells it once."""
        key = output.request_id
        stages = self._stages.pop(key, [])
        begun = begun_at(step, key)
        if begun or not stages:
            waits_since = max([arrived, *(end for _, _, end, _ in stages)])
            begun = max(waits_since, begun or now)
            stages += [("queue", waits_since, begun, False), ("prefill", begun, now, False)]
            tracing.record("queue", traceparent, waits_since, begun, waits_for="a step")
            tracing.record("prefill", traceparent, begun, now, error=output.error or "", cached=output.cached_tokens)
        return [Stage(name, begin - arrived, end - begin, elsewhere) for name, begin, end, elsewhere in stages]


def begun_at(step: Step, key: str) -> float:
    """When the prompt of a request was begun (monotonic seconds) with its first output in this step; 0: not here."""
    return next((entry.sequence.begun_at for entry in step.entries if entry.sequence.request_id == key), 0.0)
