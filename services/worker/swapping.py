"""Requests that waited for room get their KV from the KV service when their turn comes, if that pays.

Preempted ones first of all. Nothing is swapped out: the service copies what workers compute while they go on, so that
most of it is there when the blocks are taken. A request whose turn comes again is reserved blocks by the scheduler, and
what it had is fetched like any prefix. So it is with a request for whose prefix there was no room when it came. What
does not come, or not in time, is computed.
"""

from __future__ import annotations

from functools import partial

from engine.engine import Engine
from engine.request import HOST, Request
from engine.step import Step
from kv_transfer.messages import PrefixSource
from services.rpc import cluster_pb2
from services.worker.engine_thread import EngineThread
from services.worker.prefix_costs import PrefixCosts
from services.worker.receiving import KvReceiver


class Swapping:
    """Knows the KV services with blocks like those of `thread`'s engine; one on `host` is asked first."""

    def __init__(self, host: str, thread: EngineThread, receiver: KvReceiver, costs: PrefixCosts) -> None:
        self._host = host
        self._thread = thread
        self._receiver = receiver
        self._costs = costs
        self._services: dict[str, cluster_pb2.Member] = {}  # by incarnation
        self._engine: Engine = thread.engine
        self._engine.rather_fetch = self._rather_fetch

    def on_change(self, change: str, member: cluster_pb2.Member) -> None:
        """Follows the membership of KV services."""
        card, spec = member.model, self._engine.kv_cache.spec
        alike = card.fingerprint == self._engine.fingerprint and card.layout == spec.layout
        if change == "left" or member.draining:
            self._services.pop(member.incarnation, None)
        elif member.role == "kv" and alike and self._receiver.can_fetch:
            if member.incarnation not in self._services:
                self._costs.another_service()
            self._services[member.incarnation] = member

    def on_step(self, step: Step) -> None:
        """Asks for what the scheduler has reserved blocks for."""
        for request in step.fetches:
            self._fetch(request)

    def _fetch(self, request: Request) -> None:
        service = min(self._services.values(), key=lambda m: (m.host != self._host, m.name), default=None)
        if service is None:  # it has just left
            self._thread.post(partial(self._engine.recompute, request.request_id))
            return
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        source = PrefixSource(service.name, service.incarnation, service.grpc_address, tokens, HOST)
        self._receiver.fetch_again(request, source)

    def _rather_fetch(self, tokens: int) -> bool:
        """Engine thread."""
        return bool(self._services) and self._costs.restoring_pays(tokens)
