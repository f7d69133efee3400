"""What a router remembers of its latest placements, for `tandem router explain`."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from router.placer import Placed
from router.policy import Choice
from services.attempts import attempt_name, is_named
from services.rpc import router_pb2

_PLACEMENTS = 512
_ROLES = {"decodes": "decode", "prefills": "prefill"}


class _Entry(NamedTuple):
    at: float  # monotonic seconds
    attempt: str
    model: str
    prompt_tokens: int
    reason: str
    ttft: float  # predicted seconds
    tpot: float
    held: float  # seconds
    source: str
    choices: list[tuple[Choice, list[str]]]  # with the workers' names
    left_out: list[router_pb2.LeftOut]


class Explanations:
    """A ring of placements."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._ring: deque[_Entry] = deque(maxlen=_PLACEMENTS)
        self._reuse: OrderedDict[str, tuple[int, int]] = OrderedDict()  # predicted and found, of attempts that ended

    def add(
        self,
        request: router_pb2.PlaceRequest,
        placed: Placed,
        reason: str,
        held: float,
        left_out: list[router_pb2.LeftOut],
        name: Callable[[int], str],
    ) -> None:
        """A placement was made, after `held` seconds. `name`: of the worker in a row, which may be another's later."""
        self._ring.append(
            _Entry(
                at=time.monotonic(),
                attempt=attempt_name(request.request_id, request.attempt),
                model=request.model,
                prompt_tokens=request.prompt_tokens,
                reason=reason,
                ttft=placed.decision.ttft,
                tpot=placed.decision.tpot,
                held=held,
                source="" if placed.source is None else name(placed.source),
                choices=[(choice, [name(int(row)) for row in choice.rows]) for choice in placed.decision.choices],
                left_out=left_out,
            )
        )

    def ended(self, request: router_pb2.ReleaseRequest, predicted: int) -> None:
        """An attempt has ended; so many cached tokens had been predicted."""
        self._reuse[attempt_name(request.request_id, request.attempt)] = predicted, request.cached_tokens
        if len(self._reuse) > _PLACEMENTS:
            self._reuse.popitem(last=False)

    def of(self, request: str) -> router_pb2.ExplainReply:
        """Those of a request, oldest first; the latest one if none is named."""
        entries = [entry for entry in self._ring if is_named(request, entry.attempt)] if request else self._latest()
        return router_pb2.ExplainReply(placements=[self._explained(entry) for entry in entries])

    def _latest(self) -> list[_Entry]:
        return list(self._ring)[-1:]

    def _explained(self, entry: _Entry) -> router_pb2.Explanation:
        predicted, found = self._reuse.get(entry.attempt, (None, None))
        return router_pb2.Explanation(
            attempt=entry.attempt,
            seconds_ago=time.monotonic() - entry.at,
            policy=self._policy,
            model=entry.model,
            prompt_tokens=entry.prompt_tokens,
            reason=entry.reason,
            ttft_seconds=entry.ttft,
            tpot_seconds=entry.tpot,
            held_seconds=entry.held,
            source=entry.source,
            rankings=[_ranking(choice, names) for choice, names in entry.choices],
            left_out=entry.left_out,
            predicted_tokens=predicted,
            found_tokens=found,
        )


def _ranking(choice: Choice, names: list[str]) -> router_pb2.Ranking:
    workers, table = choice.workers, choice.workers.table
    columns = zip(
        names,
        choice.costs.tolist(),
        workers.cached_tokens.tolist(),
        workers.expected_tokens.tolist(),
        workers.fetchable_tokens.tolist(),
        workers.queued_tokens.tolist(),
        table["decode_tokens"].tolist(),
        table["requests"].tolist(),
        table["waiting_for_blocks"].tolist(),
        strict=True,
    )
    return router_pb2.Ranking(
        role=_ROLES[choice.role],
        candidates=choice.candidates,
        best=[
            router_pb2.RankedWorker(
                name=name,
                cost=cost,
                cached_tokens=cached,
                expected_tokens=expected,
                fetchable_tokens=fetchable,
                queued_tokens=queued,
                kept_tokens=kept,
                requests=requests,
                waiting_for_blocks=waiting,
            )
            for name, cost, cached, expected, fetchable, queued, kept, requests, waiting in columns
        ],
    )
