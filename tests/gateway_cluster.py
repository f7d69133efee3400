"""A gateway's parts with a router and workers that do as told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import msgspec
from prometheus_client import CollectorRegistry

from engine.request import SamplingParams, TokenBatch, TokenOutput
from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placements
from services.gateway.retries import RetryBudget
from services.gateway.sequences import Sequence, SequenceSpec
from services.gateway.token_socket import TokenSocket
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import RpcServer
from services.zmq_sockets import push_socket

OUTPUT = [11, 12, 13, 14]
Behaviour = Callable[["Worker", worker_pb2.SubmitRequest], list[TokenOutput]]


def output(request: worker_pb2.SubmitRequest, index: int, ids: list[int], **fields: Any) -> TokenOutput:
    return TokenOutput(request_id=request.request_id, attempt=request.attempt, index=index, token_ids=ids, **fields)


def finish(worker: "Worker", request: worker_pb2.SubmitRequest) -> list[TokenOutput]:
    """The rest of OUTPUT, one token at a time."""
    known = len(request.output_token_ids)
    assert list(request.output_token_ids) == OUTPUT[:known]
    last = len(OUTPUT) - 1
    return [
        output(request, i, [OUTPUT[i]], finish_reason="length" if i == last else None) for i in range(known, last + 1)
    ]


class Worker(worker_pb2_grpc.WorkerServicer):
    """Answers each Submit as told, in the order of `behaviours`; the last one stays."""

    def __init__(self, name: str, behaviours: list[Behaviour]) -> None:
        self.name = name
        self.behaviours = behaviours
        self.submitted: list[worker_pb2.SubmitRequest] = []
        self.aborted: list[int] = []
        self.stopped = False  # takes no request, and does not say so
        self.server = RpcServer("127.0.0.1", 0, None, CollectorRegistry())
        self.incarnation = name * 32
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self.server.server)

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        self.submitted.append(request)
        if self.stopped:
            await asyncio.sleep(60)
        behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        try:
            outputs = behaviour(self, request)
        except grpc.RpcError as refused:
            await context.abort(refused.args[0], "refused")
        socket = push_socket(request.reply_to, None)
        socket.send(msgspec.msgpack.encode(TokenBatch(self.incarnation, 0, outputs)))
        socket.close(linger=1000)
        return worker_pb2.SubmitReply()

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        self.aborted.append(request.attempt)
        return worker_pb2.AbortReply(known=True)


class Router(router_pb2_grpc.RouterServicer):
    """Places on the first worker that is not excluded."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.placed: list[router_pb2.PlaceRequest] = []
        self.reports: list[router_pb2.ReleaseRequest] = []
        self.server = RpcServer("127.0.0.1", 0, None, CollectorRegistry())
        router_pb2_grpc.add_RouterServicer_to_server(self, self.server.server)

    async def Place(self, request: router_pb2.PlaceRequest, context: Any) -> router_pb2.Placement:
        self.placed.append(request)
        for worker in self.workers:
            if worker.incarnation not in request.exclude_incarnations:
                decode = router_pb2.Endpoint(
                    name=worker.name, incarnation=worker.incarnation, address=worker.server.address
                )
                return router_pb2.Placement(decode=decode)
        context.set_trailing_metadata((("retry-after", "7"),))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody")
        raise AssertionError

    async def Release(self, request: router_pb2.ReleaseRequest, context: Any) -> router_pb2.ReleaseReply:
        self.reports.append(request)
        return router_pb2.ReleaseReply()

    @property
    def released(self) -> list[int]:
        return [report.attempt for report in self.reports]

    @property
    def outcomes(self) -> dict[int, router_pb2.Outcome]:
        """By attempt."""
        return {report.attempt: report.outcome for report in self.reports}


class Setting:
    """One gateway's parts with a router and workers."""

    def __init__(
        self,
        placements: Placements,
        tokens: TokenSocket,
        router: Router,
        states: dict[str, ClusterState],
        members: dict[str, cluster_pb2.Member],
        new_state: Callable[[], ClusterState],
    ) -> None:
        self.placements = placements
        self._states = states  # by address, as the next ones
        self._members = members
        self._new_state = new_state
        self.tokens = tokens
        self.router = router

    async def leave(self, worker: Worker) -> None:
        """The worker is no member any more, as all hear; its server stays."""
        await self._states[worker.server.address].close()

    async def come_back(self, worker: Worker) -> None:
        """After `leave`: as a process that stood still for longer than its lease."""
        state = self._states[worker.server.address] = self._new_state()
        await state.connect()
        await state.register(self._members[worker.server.address])

    def sequence(self, **fields: Any) -> Sequence:
        spec = SequenceSpec(
            request_id="cmpl-1-0",
            model="m",
            prompt_token_ids=list(range(40)),
            sampling=SamplingParams(max_tokens=len(OUTPUT), seed=5),
            fingerprint="f",
            cache_salt="",
            tenant="",
            session="",
            priority=0,
            deadline=asyncio.get_running_loop().time() + 30,
            reply_to=self.tokens.address,
            gateway_incarnation="g" * 32,
        )
        return Sequence(msgspec.structs.replace(spec, **fields), self.placements, self.tokens, lambda: None)


@contextlib.asynccontextmanager
async def setting(*behaviours: list[Behaviour], wait: float = 0.5) -> AsyncIterator[Setting]:
    """One worker for each list of behaviours."""
    embedded = EmbeddedState()
    workers = [Worker("abcdef"[i], list(b)) for i, b in enumerate(behaviours)]
    router = Router(workers)
    states: dict[str, ClusterState] = {}
    members: dict[str, cluster_pb2.Member] = {}

    def new_state() -> ClusterState:
        return ClusterState(embedded.url, "test")

    for part in (router, *workers):
        await part.server.start()
        await part.server.set_healthy(True)
        state = new_state()
        await state.connect()
        member = cluster_pb2.Member(name="x", grpc_address=part.server.address, incarnation="r" * 32, role="router")
        if isinstance(part, Worker):
            member.incarnation, member.role = part.incarnation, "decode"
            member.model.name = "m"
            member.model.layout, member.model.block_size = f"l{len(states)}", 16 * len(states)
        await state.register(member)
        states[part.server.address], members[part.server.address] = state, member
    state = new_state()
    await state.connect()
    tokens = TokenSocket("127.0.0.1", None)
    receiving = asyncio.create_task(tokens.run())
    placements = Placements(state, None, wait, RetryBudget(GatewayMetrics()))
    try:
        yield Setting(placements, tokens, router, states, members, new_state)
    finally:
        receiving.cancel()
        await placements.close()
        for each in (state, *states.values()):
            await each.close()
        for part in (router, *workers):
            await part.server.stop(0)
        tokens.close()
        embedded.close()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def taken(sequence: Sequence) -> list[int]:
    return [token for out in sequence.take() for token in out.token_ids]
