"""`tandem kv trace`: what both workers of a KV transfer remember of it, on one clock."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import grpc
import grpc.aio
import msgspec

from services.config import ConfigError
from services.rpc import cluster_pb2, trace_pb2, trace_pb2_grpc
from services.rpc_server import make_channel
from services.running import RunningCluster, members_of
from services.security import ClusterKey, key_of

_SECONDS = 3.0


class Event(msgspec.Struct, frozen=True):
    """Something that happened; `ms` after the request arrived at the decode worker."""

    ms: float
    worker: str
    event: str
    detail: str


class Push(msgspec.Struct, frozen=True):
    """Layers of a chunk: computed at `ms`, then pushed for `push_ms`. The chunk ends with prompt token `tokens`."""

    ms: float
    push_ms: float
    layer: int  # the first
    layers: int
    tokens: int
    bytes: int


class Trace(msgspec.Struct, frozen=True):
    """One transfer. A side is empty, and its events are missing, where its worker is gone or has forgotten it."""

    transfer: str  # response, sequence and attempt
    connector: str
    prefill: str  # names of the workers: the one that sends
    decode: str  # and the one that receives
    bytes: int
    clock_error_ms: float  # of the prefill worker's times: 0 on one machine
    exposed_ms: float | None  # from the last layer computed to the commit; None: not committed
    events: list[Event]
    pushes: list[Push]
    pushes_left_out: int


class _Answer(NamedTuple):
    """What one worker remembers, and how its clock reads against ours."""

    reply: trace_pb2.TimelinesReply
    ahead: float  # seconds by which its clock is ahead of ours
    error: float  # at most, seconds


async def gather(running: RunningCluster, request: str) -> list[Trace]:
    """The transfers of a request, oldest first; the latest transfer for "". Raises ConfigError if nobody knows it."""
    key = key_of(running)
    workers = await members_of(running, "prefill", "decode", "aggregated", "kv")
    if not workers:
        raise ConfigError("this cluster has no workers, so no KV is moved")
    if not request:
        answers = await _ask_all(workers, key, "")
        latest = [(timeline.marks[0].at - answer.ahead, timeline) for answer in answers for timeline in _all(answer)]
        if not latest:
            raise ConfigError(
                "no KV has been moved yet: that of prompts below --local-prefill-tokens is not, nor that of prefixes "
                "below --fetch-tokens"
            )
        request = max(latest, key=lambda entry: entry[0])[1].transfer_id
    answers = await _ask_all(workers, key, request)
    if traces := _join(answers):
        return traces
    raise ConfigError(
        f"no worker remembers a KV transfer of {request!r}. Give the `id` of a response; each worker keeps its latest "
        "512 transfers, and short or cached prompts need none. Without an id the latest transfer is shown"
    )


def _all(answer: _Answer) -> list[trace_pb2.Timeline]:
    return list(answer.reply.timelines)


async def _ask_all(workers: list[cluster_pb2.Member], key: ClusterKey | None, request: str) -> list[_Answer]:
    answers = await asyncio.gather(*(_ask(worker, key, request) for worker in workers))
    return [answer for answer in answers if answer is not None]


async def _ask(worker: cluster_pb2.Member, key: ClusterKey | None, request: str) -> _Answer | None:
    """None: it does not answer, as a worker that has just died."""
    async with make_channel(worker.grpc_address, key) as channel:
        try:
            async with asyncio.timeout(_SECONDS):
                await channel.channel_ready()  # so that the call below takes as long there as back
            before = time.monotonic()
            stub = trace_pb2_grpc.TraceStub(channel)
            reply = await stub.Timelines(trace_pb2.TimelinesRequest(request=request), timeout=_SECONDS)
        except (TimeoutError, grpc.aio.AioRpcError):
            return None
    after = time.monotonic()
    return _Answer(reply, reply.now - (before + after) / 2, (after - before) / 2)


def _join(answers: list[_Answer]) -> list[Trace]:
    """Puts the sides of each transfer together."""
    sides = {
        (timeline.transfer_id, timeline.sends, timeline.incarnation, timeline.peer): (timeline, answer)
        for answer in answers
        for timeline in _all(answer)
    }
    traces = []
    for (transfer, sends, own, peer), side in sorted(sides.items(), key=lambda entry: entry[0][0]):
        other = sides.get((transfer, not sends, peer, own))
        if not sends:
            traces.append(_trace(side, other))
        elif other is None:
            traces.append(_trace(None, side))
    return traces


_Side = tuple[trace_pb2.Timeline, _Answer]


def _trace(decode: _Side | None, prefill: _Side | None) -> Trace:
    """Times are those of the decode worker's clock, where there is a decode worker."""
    sides = [side for side in (decode, prefill) if side is not None]
    first, clock = sides[0]
    origin = first.marks[0].at
    events, pushes, error = list[Event](), list[Push](), 0.0
    for timeline, answer in sides:
        shift = origin
        if answer.reply.boot_id != clock.reply.boot_id:
            shift += answer.ahead - clock.ahead
            error = answer.error + clock.error
        for mark in timeline.marks:
            events.append(Event(_ms(mark.at - shift), timeline.worker, mark.event, mark.detail))
        for push in timeline.pushes:
            pushes.append(
                Push(_ms(push.at - shift), _ms(push.seconds), push.layer, push.layers, push.tokens, push.bytes)
            )
    when = {event.event: event.ms for event in events}
    exposed = when["committed"] - when["last layer"] if when.keys() >= {"committed", "last layer"} else None
    return Trace(
        transfer=first.transfer_id,
        connector=first.connector,
        prefill=prefill[0].worker if prefill else "",
        decode=decode[0].worker if decode else "",
        bytes=prefill[0].bytes if prefill else first.bytes,
        clock_error_ms=_ms(error),
        exposed_ms=None if exposed is None else round(exposed, 3),
        events=sorted(events, key=lambda event: event.ms),
        pushes=pushes,
        pushes_left_out=prefill[0].pushes_left_out if prefill else 0,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
