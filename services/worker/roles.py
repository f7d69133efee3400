"""Another role for a worker that runs: it keeps its weights and its cached KV, and does other work.

A role is what routers give a worker. What it could do of the old role it still can, so it is never out: it says its
new role in the cluster state, and what is under way of the old one finishes, or moves to other workers, meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import grpc.aio
import structlog

from services.cluster_state import ClusterState
from services.config import WorkerConfig
from services.redis_client import REDIS_ERRORS
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.worker.connectors import can_be_written, can_move_kv
from services.worker.engine_thread import EngineThread
from services.worker.sending import KvSender
from services.worker.servicer import WorkerService

log = structlog.get_logger()

ROLES = ("prefill", "decode", "aggregated")
DECODING = ("decode", "aggregated")
_MIXED_PREFILL_TOKENS = {"decode": 128}  # a prompt that is computed here all the same must not stall the streams
_POLL_SECONDS = 0.02
_STRAGGLERS_SECONDS = 0.3  # in which what was placed before comes in
_LOCK_SECONDS = 5.0
_TOLD = "the worker has another role now"


def mixed_prefill_tokens(config: WorkerConfig, role: str) -> int | None:
    """Prompt tokens that a step with decodes may hold on a worker of this role; None: what the budget leaves."""
    return config.max_mixed_prefill_tokens or _MIXED_PREFILL_TOKENS.get(role)


class _Refused(Exception):
    """Why a worker does not take a role."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class RoleService(worker_pb2_grpc.RoleServicer):
    """Changes this worker's role. `member` is what it says of itself in the cluster state."""

    def __init__(
        self,
        config: WorkerConfig,
        member: cluster_pb2.Member,
        state: ClusterState,
        thread: EngineThread,
        service: WorkerService,
        sender: KvSender,
    ) -> None:
        self._config = config
        self._member = member
        self._state = state
        self._thread = thread
        self._service = service
        self._sender = sender
        self._one_at_a_time = asyncio.Lock()
        self._changing: asyncio.Task[worker_pb2.SetRoleReply] | None = None

    async def SetRole(
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SetRoleReply:
        """Answers when nothing of the old role is under way."""
        if request.role not in ROLES:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{request.role!r} is no role: {', '.join(ROLES)}")
        async with self._one_at_a_time:
            if self._changing is not None:  # of a caller who has gone
                await asyncio.wait((self._changing,))
            if request.role == self._member.role:
                return worker_pb2.SetRoleReply(before=request.role)
            try:
                # Once it is begun it is ended, also if nobody waits for that any more.
                self._changing = asyncio.get_running_loop().create_task(self._change(request))
                return await asyncio.shield(self._changing)
            except _Refused as error:
                await context.abort(error.code, str(error))
        raise AssertionError("abort raises")

    async def _change(self, request: worker_pb2.SetRoleRequest) -> worker_pb2.SetRoleReply:
        started, before = time.monotonic(), self._member.role
        if reason := self._reason_against(request.role):
            raise _Refused(grpc.StatusCode.FAILED_PRECONDITION, reason)
        await self._say(request.role, force=request.force)
        moved = await self._see_out(before, request.role, request.finish_seconds)
        seconds = time.monotonic() - started
        log.info("role changed", before=before, role=request.role, seconds=round(seconds, 3), moved=moved)
        return worker_pb2.SetRoleReply(before=before, seconds=seconds, moved=moved)

    def _reason_against(self, role: str) -> str:
        """Why this worker cannot take the role now, or ever; "" if it can."""
        config = self._config
        if self._member.asleep:
            return "this worker is asleep: wake it first"
        if self._member.draining:
            return "this worker is draining: it takes nothing new"
        if not can_move_kv(config):
            return "this worker was started as an aggregated one of several ranks, whose KV cannot be moved"
        if role == "decode" and not can_be_written(config):
            return "this worker was started as an aggregated one on a CUDA device: peers cannot write into its cache"
        return ""

    async def _say(self, role: str, *, force: bool) -> None:
        """Has the cluster know the role. Of several workers one at a time, so that one that decodes is left."""
        model = self._member.model.name
        lock = self._state.lease(f"roles:{model}", self._member.incarnation, _LOCK_SECONDS)
        if role == "prefill":
            await self._thread.call(self._compute_for_others)  # a step may take longer than the lock lasts
        try:
            if await lock.take() != self._member.incarnation:
                raise _Refused(grpc.StatusCode.ABORTED, "another worker changes its role now: try again")
            try:
                await self._state.refresh()
                if role not in DECODING and not force and not self._others_that_decode():
                    raise _Refused(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        f"this is the last worker that decodes {model}: no request could run; --force does it",
                    )
                self._member.role = role
                await self._state.announce()
            finally:
                await lock.give_back()
        except REDIS_ERRORS as error:
            if self._member.role != role:
                reason = f"the cluster state does not answer, and nobody would hear of the role: {error}"
                raise _Refused(grpc.StatusCode.UNAVAILABLE, reason) from error
        finally:
            if role == "prefill" and self._member.role != role:
                await self._thread.call(self._compute_for_itself)

    def _others_that_decode(self) -> list[cluster_pb2.Member]:
        own = self._member
        return [
            member
            for member in self._state.members(*DECODING)
            if member.incarnation != own.incarnation
            and member.model.name == own.model.name
            and not (member.draining or member.asleep)
        ]

    async def _see_out(self, before: str, role: str, finish_seconds: float) -> int:
        """Until nothing of the old role is under way; returns how many streams were moved."""
        begun, moved = time.monotonic(), 0
        while True:
            waited = time.monotonic() - begun
            if role == "prefill" and waited >= finish_seconds:
                moved += self._service.move_streams(_TOLD)
            streams = len(self._service.admitted) if role == "prefill" else 0
            prompts = self._sender.num_prompts if before == "prefill" else 0
            if not streams and not prompts and waited >= _STRAGGLERS_SECONDS:
                break
            await asyncio.sleep(_POLL_SECONDS)
        tokens = mixed_prefill_tokens(self._config, role)

        def settle() -> None:
            self._thread.engine.limit_mixed_prefill(tokens)
            if before == "prefill":
                self._compute_for_itself()

        await self._thread.call(settle)
        return moved

    def _compute_for_others(self) -> None:
        """Engine thread."""
        self._thread.engine.on_layers = self._sender.on_layers

    def _compute_for_itself(self) -> None:
        """Engine thread."""
        self._thread.engine.on_layers = None
