"""Pins of sessions: at the wish of a request, the KV service does not give up its prompt's blocks for a while.

A session has one pin, which its next request with the header renews and widens, and one with 0 seconds ends. What came
of it the header of the same name tells in the answer; nothing that is wrong with pins keeps a request from its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math

import grpc.aio
import structlog

from engine.hashing import block_hashes, root_hash
from services.cluster_state import ClusterState
from services.gateway.errors import invalid
from services.gateway.generation import Plan
from services.gateway.placement import Placements
from services.rpc import cluster_pb2, tiers_pb2, tiers_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

log = structlog.get_logger()

PIN_HEADER = "x-tandem-pin"
_SECONDS = 1.0  # that a KV service has to answer


def seconds_to_pin(value: str | None, session: str) -> float | None:
    """Of the header's value; None: there is none. Raises ApiError."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise invalid(f"{PIN_HEADER} is a number of seconds, 0 to end the pin", PIN_HEADER, "invalid_pin")
    if not session:
        raise invalid(f"{PIN_HEADER} pins for a session: name it by x-session-id", "x-session-id", "invalid_pin")
    return seconds


class Pins:
    """Has the KV services of a request's model pin its prompts."""

    def __init__(self, state: ClusterState, placements: Placements) -> None:
        self._state = state
        self._placements = placements

    def begin(self, plan: Plan, seconds: float) -> asyncio.Task[str]:
        """What came of it, as the header's value; it never fails."""
        return asyncio.get_running_loop().create_task(self._pin(plan, seconds))

    async def _pin(self, plan: Plan, seconds: float) -> str:
        session, tenant = plan.session.encode(), plan.tenant.id
        name = hashlib.sha256(f"{len(tenant)}:{tenant}".encode() + session).hexdigest()[:32]
        members = [
            member
            for member in self._state.members("kv")
            if member.model.name == plan.card.name and member.model.fingerprint == plan.card.fingerprint
        ]
        asked = [self._ask(member, plan, name, seconds) for member in members]
        replies = [reply for reply in await asyncio.gather(*asked) if reply is not None]
        if not replies:
            return "blocks=0, limit=unavailable"
        best = max(replies, key=lambda reply: reply.blocks)
        told = f"name={name}, blocks={best.blocks}, seconds={best.seconds:.0f}"
        return told + (f", limit={best.limit}" if best.limit else "")

    async def _ask(
        self, member: cluster_pb2.Member, plan: Plan, name: str, seconds: float
    ) -> tiers_pb2.PinReply | None:
        card = member.model
        root = root_hash(
            fingerprint=card.fingerprint, layout=card.layout, block_size=card.block_size, salt=plan.cache_salt
        )
        hashes = dict.fromkeys(each for prompt in plan.prompts for each in block_hashes(prompt, card.block_size, root))
        request = tiers_pb2.PinRequest(name=name, owner=plan.tenant.id, block_hashes=hashes, seconds=seconds)
        stub = tiers_pb2_grpc.TiersStub(self._placements.channel(member.grpc_address))
        try:
            return await answer_of(stub.Pin(request, timeout=_SECONDS))
        except (grpc.aio.AioRpcError, ChannelClosed) as error:
            log.info("a KV service does not pin", member=member.name, error=str(error))
            return None
