"""Admin routes about the members of the cluster: who they are, drain of workers, and other roles for them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import grpc
import grpc.aio
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from services.cluster_state import ClusterState
from services.gateway.body import read_body
from services.gateway.errors import ApiError
from services.gateway.placement import Placements
from services.members import FLIP_SECONDS, Drained, Flipped, MemberView, Status
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

_WORKER_ROLES = ("prefill", "decode", "aggregated")
_ANSWER_SECONDS = 5.0
_MAX_BODY_BYTES = 1 << 16
_FLIP_STATUS = {grpc.StatusCode.FAILED_PRECONDITION: 409, grpc.StatusCode.ABORTED: 409}


class _Workers(msgspec.Struct, forbid_unknown_fields=True):
    """Whom a request is about, by name. "all" must be said."""

    workers: list[str] | Literal["all"]


class _Drain(_Workers, forbid_unknown_fields=True):
    leave: bool = False  # end as on SIGTERM


class _Flip(msgspec.Struct, forbid_unknown_fields=True):
    worker: str
    role: Literal["prefill", "decode", "aggregated"]
    finish_seconds: Annotated[float, msgspec.Meta(ge=0, le=600)] = 5.0
    force: bool = False


class Members:
    """The routes. Errors are those of the API, in its shape."""

    def __init__(self, state: ClusterState, placements: Placements) -> None:
        self._state = state
        self._placements = placements

    def routes(self) -> list[BaseRoute]:
        """For the admin port."""
        return [
            Route("/admin/status", self._status),
            Route("/admin/drain", self._drain, methods=["POST"]),
            Route("/admin/undrain", self._undrain, methods=["POST"]),
            Route("/admin/role", self._flip, methods=["POST"]),
        ]

    async def _status(self, _request: Request) -> Response:
        """All members, as they say of themselves, and whether a request could run now."""
        members = sorted(self._state.members(), key=lambda member: (member.role, member.name))
        models = sorted({member.model.name for member in members if member.HasField("model")})
        status = Status(
            models={model: self._placements.is_ready(model) for model in models},
            connected=self._state.connected,
            members=[_view(member) for member in members],
        )
        return _json(status)

    async def _drain(self, request: Request) -> Response:
        """Workers take nothing new, and say how much they have under way; with `leave` they end as on SIGTERM."""
        body = await _body(request, _Drain)

        async def drain(stub: worker_pb2_grpc.DrainStub) -> int:
            reply = await answer_of(stub.Drain(worker_pb2.DrainRequest(leave=body.leave), timeout=_ANSWER_SECONDS))
            return reply.under_way

        return await self._ask_all(body.workers, drain)

    async def _undrain(self, request: Request) -> Response:
        """Workers take requests again."""
        body = await _body(request, _Workers)

        async def undrain(stub: worker_pb2_grpc.DrainStub) -> None:
            await answer_of(stub.Undrain(worker_pb2.UndrainRequest(), timeout=_ANSWER_SECONDS))

        return await self._ask_all(body.workers, undrain)

    async def _flip(self, request: Request) -> Response:
        """A worker takes another role, and answers when nothing of the old one is under way."""
        body = await _body(request, _Flip, '{"worker": "decode-0", "role": "prefill"}')
        (worker,) = self._workers([body.worker])[:1]
        stub = worker_pb2_grpc.RoleStub(self._placements.channel(worker.grpc_address))
        asked = worker_pb2.SetRoleRequest(role=body.role, finish_seconds=body.finish_seconds, force=body.force)
        try:
            reply = await answer_of(stub.SetRole(asked, timeout=body.finish_seconds + FLIP_SECONDS))
        except grpc.aio.AioRpcError as error:
            status = _FLIP_STATUS.get(error.code(), 503)
            reason = error.details() or error.code().name
            raise ApiError(status, f"{worker.name} keeps its role: {reason}", code="role_refused") from None
        except ChannelClosed as error:
            raise ApiError(503, f"{worker.name} does not answer: {error}", code="role_refused") from None
        flipped = Flipped(worker.name, reply.before, body.role, round(reply.seconds, 3), reply.moved)
        return _json(flipped)

    def _workers(self, names: list[str] | Literal["all"]) -> list[cluster_pb2.Member]:
        """The workers of these names. Raises ApiError 404 if one is not known."""
        workers = sorted(self._state.members(*_WORKER_ROLES), key=lambda worker: worker.name)
        known = [worker.name for worker in workers]
        if names == "all":
            return workers
        if unknown := [name for name in names if name not in known]:
            there = ", ".join(known) or "none"
            raise ApiError(404, f"There is no worker {unknown[0]!r}; there are: {there}", code="unknown_worker")
        return [worker for worker in workers if worker.name in names]

    async def _ask_all(self, names: list[str] | Literal["all"], ask: Any) -> Response:
        """What each of these workers answers. Raises ApiError 404 before any is asked if one is not known."""

        async def one(worker: cluster_pb2.Member) -> Drained:
            stub = worker_pb2_grpc.DrainStub(self._placements.channel(worker.grpc_address))
            try:
                return Drained(worker.name, await ask(stub))
            except grpc.aio.AioRpcError as error:
                return Drained(worker.name, error=error.details() or error.code().name)
            except ChannelClosed as error:
                return Drained(worker.name, error=str(error))

        return _json({"workers": await asyncio.gather(*map(one, self._workers(names)))})


async def _body(request: Request, kind: type[Any], example: str = '{"workers": ["decode-0"]}, or "all"') -> Any:
    try:
        return msgspec.json.decode(await read_body(request, _MAX_BODY_BYTES, _ANSWER_SECONDS), type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(400, f"The body is not as it should be ({error}); send {example}", code="invalid_body") from None


def _view(member: cluster_pb2.Member) -> MemberView:
    is_worker = member.role in _WORKER_ROLES
    return MemberView(
        name=member.name,
        role=member.role,
        state="draining" if member.draining else "asleep" if member.asleep else "ready",
        host=member.host,
        pid=member.pid,
        incarnation=member.incarnation,
        running=member.load.running if is_worker else None,
        waiting=member.load.waiting if is_worker else None,
        model=member.model.name if is_worker else "",
        gpu=member.gpu,
        gpus=member.gpus,
        kv_tokens=member.model.num_blocks * member.model.block_size if is_worker else 0,
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
