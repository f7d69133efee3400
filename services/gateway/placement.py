"""The gateway's line to router and workers: place, submit, abort, release; and who has left.

Every call has a deadline. What can be tried again is, within `worker_wait` seconds; what remains becomes an ApiError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import stamina
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.admission import Shed
from services.cluster_state import ClusterState
from services.gateway.errors import ApiError, invalid, load_shed, overloaded, timed_out, unavailable
from services.gateway.retries import RetryBudget
from services.gateway.routers import NoRouter, Routers
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of, make_channel
from services.security import ClusterKey

log = structlog.get_logger()

_PLACE_SECONDS = 2.0  # until a router that has not answered must show that it lives
_SUBMIT_SECONDS = 5.0
_NOTICE_SECONDS = 2.0  # abort
_PROBE_SECONDS = 1.0
_WAKING_SECONDS = 5
_DECODING_ROLES = ("decode", "aggregated")
_WORKER_ROLES = ("prefill", *_DECODING_ROLES)
_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: router_pb2.LOST,
    grpc.StatusCode.CANCELLED: router_pb2.LOST,
    grpc.StatusCode.DEADLINE_EXCEEDED: router_pb2.TIMED_OUT,
    # A worker that is full, asleep, leaving or another one than was meant has no fault.
    grpc.StatusCode.RESOURCE_EXHAUSTED: router_pb2.UNTOLD,
    grpc.StatusCode.FAILED_PRECONDITION: router_pb2.UNTOLD,
}
_TRY_AGAIN = (
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class WorkerLost(Exception):
    """The worker cannot take the request, or cannot be reached; another one can. `outcome`: what that says of it."""

    def __init__(self, reason: str, outcome: router_pb2.Outcome) -> None:
        super().__init__(reason)
        self.outcome = outcome


class _HeldInVain(Exception):
    """The router that held the request is gone."""


class Placements:
    """Places requests on workers through the router."""

    def __init__(self, state: ClusterState, key: ClusterKey | None, worker_wait: float, retries: RetryBudget) -> None:
        self.retries = retries
        self._state = state
        self._key = key
        self._worker_wait = worker_wait
        self._channels: dict[str, grpc.aio.Channel] = {}  # by address
        self._routers = Routers(state, self.channel)
        self._watches: dict[str, asyncio.Task[None]] = {}  # by incarnation of a decoding worker
        self._background: set[asyncio.Task[None]] = set()
        self._on_lost: list[Callable[[str], None]] = []
        self._on_joined: list[Callable[[str], None]] = []
        self._cards: dict[str, cluster_pb2.ModelCard] = {}  # by the model's name
        state.on_change(self._changed)

    def card(self, model: str) -> cluster_pb2.ModelCard | None:
        """What workers say of the model; still known when all are gone. None before the first one."""
        return self._cards.get(model)

    def layouts(self, model: str) -> set[tuple[str, int]]:
        """(layout, tokens) of the KV blocks that workers of the model keep."""
        cards = (member.model for member in self._members(model, *_WORKER_ROLES))
        return {(card.layout, card.block_size) for card in cards if card.block_size}

    def is_ready(self, model: str) -> bool:
        """Whether a request for the model could run now: there is a router and a worker that decodes."""
        return bool(self._state.members("router")) and any(
            not member.draining and not member.asleep for member in self._members(model, *_DECODING_ROLES)
        )

    def is_asleep(self, model: str) -> bool:
        """Whether the model has workers that decode, and all of them sleep."""
        members = self._members(model, *_DECODING_ROLES)
        return bool(members) and all(member.asleep for member in members)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with the incarnation of each decoding worker that is gone."""
        self._on_lost.append(callback)

    def on_joined(self, callback: Callable[[str], None]) -> None:
        """Calls `callback` with the incarnation of each decoding worker that is there from now on, maybe again."""
        self._on_joined.append(callback)

    def channel(self, address: str) -> grpc.aio.Channel:
        """The one channel to `address`."""
        if address not in self._channels:
            self._channels[address] = make_channel(address, self._key)
        return self._channels[address]

    async def place(self, request: router_pb2.PlaceRequest, deadline: float) -> router_pb2.Placement:
        """A placement; waits up to `worker_wait` seconds for a worker, not beyond `deadline` (time.monotonic()).

        A router may hold the request for as long as all workers are full. If it is lost, another one is asked as if
        nothing had been before. Raises ApiError.
        """
        for lost in itertools.count():
            with contextlib.suppress(_HeldInVain):
                return await self._place(request, deadline, lost)
        raise AssertionError("it counts without end")

    async def _place(self, request: router_pb2.PlaceRequest, deadline: float, lost: int) -> router_pb2.Placement:
        """`lost`: routers that have held it in vain."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise timed_out()
        try:
            async for attempt in stamina.retry_context(
                on=self._is_tried_again,
                attempts=None,
                timeout=min(remaining, self._worker_wait),
                wait_initial=0.05,
                wait_max=0.5,
                wait_jitter=0.05,
            ):
                with attempt:
                    if self.is_asleep(request.model):
                        raise unavailable("All workers are asleep; `tandem wake` wakes them", _WAKING_SECONDS)
                    request.deadline_seconds = max(deadline - time.monotonic(), 0.001)
                    return await _ask(self._routers.choose(request, attempt.num + lost), request)
        except (NoRouter, ChannelClosed):
            raise unavailable("No router is available now") from None
        except grpc.aio.AioRpcError as error:
            raise _refusal(error, request.model, deadline) from None
        raise AssertionError("the retry loop ends by return or raise")

    async def submit(self, worker: router_pb2.Endpoint, request: worker_pb2.SubmitRequest, deadline: float) -> None:
        """Gives the request to its decode worker. Raises WorkerLost, or ApiError for what no worker can run."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise timed_out()
        request.deadline_seconds = remaining
        try:
            stub = worker_pb2_grpc.WorkerStub(self.channel(worker.address))
            await answer_of(stub.Submit(request, timeout=min(_SUBMIT_SECONDS, remaining)))
        except ChannelClosed as error:
            raise WorkerLost(str(error), router_pb2.LOST) from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                raise invalid(error.details() or "The request cannot run", None) from None
            outcome = _FAULTS.get(error.code(), router_pb2.WORKER_ERROR)
            if outcome == router_pb2.TIMED_OUT and remaining < _SUBMIT_SECONDS:
                outcome = router_pb2.UNTOLD  # the worker had less time than it may take
            raise WorkerLost(f"{error.code().name}: {error.details()}", outcome) from None

    def abort(self, worker: router_pb2.Endpoint, request_id: str, attempt: int, reason: str) -> None:
        """Tells the worker in the background that the attempt is not wanted any more."""
        request = worker_pb2.AbortRequest(request_id=request_id, attempt=attempt, reason=reason)
        stub = worker_pb2_grpc.WorkerStub(self.channel(worker.address))
        self._spawn(_notice(stub.Abort(request, timeout=_NOTICE_SECONDS)))

    def release(self, request: router_pb2.ReleaseRequest) -> None:
        """Tells the router in the background that an attempt has ended, and how."""
        self._spawn(self._routers.release(request))

    async def close(self) -> None:
        """Sees notices out and closes all channels."""
        for watch in self._watches.values():
            watch.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=_NOTICE_SECONDS)
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    # Inside

    def _members(self, model: str, *roles: str) -> list[cluster_pb2.Member]:
        return [member for member in self._state.members(*roles) if member.model.name == model]

    def _is_tried_again(self, error: Exception) -> bool:
        """Whether to ask again: for who is gone one waits, who fails is asked again within the budget."""
        if isinstance(error, NoRouter | ChannelClosed):
            return True
        if not isinstance(error, grpc.aio.AioRpcError):
            return False
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return True
        return error.code() in _TRY_AGAIN and self.retries.spend(time.monotonic())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _changed(self, change: str, member: cluster_pb2.Member) -> None:
        if change == "left":
            if watch := self._watches.pop(member.incarnation, None):
                watch.cancel()
                self._lost(member.incarnation)
            address = member.grpc_address
            if address in self._channels and all(other.grpc_address != address for other in self._state.members()):
                self._spawn(self._channels.pop(address).close())
        elif member.role in _DECODING_ROLES:
            self._cards[member.model.name] = member.model
            if change == "joined":
                for callback in self._on_joined:
                    callback(member.incarnation)
            if member.incarnation not in self._watches:
                self._watches[member.incarnation] = asyncio.get_running_loop().create_task(self._watch(member))

    def _lost(self, incarnation: str) -> None:
        for callback in self._on_lost:
            callback(incarnation)

    async def _watch(self, member: cluster_pb2.Member) -> None:
        """Sees a worker die by its connection, which is sooner than its lease runs out."""
        channel = self.channel(member.grpc_address)
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            state = channel.get_state(try_to_connect=True)
            if state is not grpc.ChannelConnectivity.READY:
                try:
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.UNAVAILABLE:
                        self._lost(member.incarnation)
                    await asyncio.sleep(_PROBE_SECONDS)
                continue
            await channel.wait_for_state_change(state)


async def _ask(channel: grpc.aio.Channel, request: router_pb2.PlaceRequest) -> router_pb2.Placement:
    """A router's answer, which may take until the deadline. Raises _HeldInVain if it is lost after a while."""
    call = router_pb2_grpc.RouterStub(channel).Place(request, timeout=request.deadline_seconds)
    answer: asyncio.Future[router_pb2.Placement] = asyncio.ensure_future(answer_of(call))
    health, is_held = health_pb2_grpc.HealthStub(channel), False
    try:
        while not (await asyncio.wait((answer,), timeout=_PLACE_SECONDS))[0]:
            is_held = True
            await answer_of(health.Check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS))
        return answer.result()
    except ChannelClosed:
        raise (_HeldInVain if is_held else ChannelClosed) from None
    except grpc.aio.AioRpcError as error:
        if is_held and error.code() in (grpc.StatusCode.UNAVAILABLE, *_TRY_AGAIN):
            raise _HeldInVain from None
        raise
    finally:
        answer.cancel()


async def _notice(call: Any) -> None:
    """Waits for a call whose failure changes nothing: the peer is gone, or its lease runs out."""
    try:
        await answer_of(call)
    except grpc.aio.AioRpcError as error:
        log.debug("a notice was lost", code=error.code().name, details=error.details())
    except ChannelClosed as error:
        log.debug("a notice was lost", details=str(error))


def _refusal(error: grpc.aio.AioRpcError, model: str, deadline: float) -> ApiError:
    """What the client hears when the router gave no placement."""
    retry_after = _retry_after(error)
    if time.monotonic() >= deadline:
        return timed_out()
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if dict(error.trailing_metadata() or ()).get("shed") == Shed.EXCESS.value:
            return load_shed(retry_after)
        return overloaded("The cluster is full; try again later", retry_after)
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return invalid(error.details() or "The request cannot be placed", None)
    log.warning("no placement", code=error.code().name, details=error.details())
    return unavailable(f"No worker of the model `{model}` is available now", retry_after)


def _retry_after(error: grpc.aio.AioRpcError) -> int:
    """Whole seconds, at least 1."""
    for key, value in error.trailing_metadata() or ():
        if key == "retry-after":
            try:
                return max(1, math.ceil(float(value)))
            except ValueError:
                break
    return 1
