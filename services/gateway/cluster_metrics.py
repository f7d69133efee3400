"""The metrics of the whole cluster, or a share of it, in one text: each member's, by its name, role and model."""

from __future__ import annotations

import asyncio
import hashlib

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.gateway.placement import Placements
from services.rpc import cluster_pb2, cluster_pb2_grpc
from services.rpc_server import ChannelClosed, answer_of

log = structlog.get_logger()

_MEMBER_SECONDS = 1.0


class _Collected(Collector):
    """Families of several processes, merged by name. A label of a sample's own is kept as it is."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def add(self, text: str, labels: dict[str, str]) -> None:
        """Adds what one process exports. Raises ValueError if it is malformed."""
        for family in text_string_to_metric_families(text):
            merged = self._families.get(family.name)
            if merged is None:
                merged = self._families[family.name] = Metric(family.name, family.documentation, family.type)
            for sample in family.samples:
                merged.add_sample(sample.name, labels | sample.labels, sample.value)

    def collect(self) -> list[Metric]:
        """All families."""
        return list(self._families.values())


def share_of(gateway: str, members: list[cluster_pb2.Member]) -> list[cluster_pb2.Member]:
    """Those members of which this gateway (an incarnation) tells: of all gateways' shares each member is in just one.

    Members stay where they are as other gateways come and go (highest random weight).
    """
    gateways = [member.incarnation for member in members if member.role == "gateway"]

    def weight(candidate: str, member: cluster_pb2.Member) -> bytes:
        return hashlib.sha256(f"{candidate} {member.incarnation}".encode()).digest()

    def teller(member: cluster_pb2.Member) -> str:
        return max(gateways, key=lambda candidate: weight(candidate, member))

    return [member for member in members if gateways and teller(member) == gateway]


async def cluster_metrics(members: list[cluster_pb2.Member], placements: Placements) -> bytes:
    """Prometheus text of those that answer within a second. Each has labels of its own, whatever its name."""
    members = sorted(members, key=lambda member: (member.role, member.name, member.incarnation))
    texts = await asyncio.gather(*(_fetch(placements, member) for member in members))
    collected = _Collected()
    named: set[tuple[str, str]] = set()
    # Those that answer first: of one name, one that is gone leaves it to its successor.
    for member, text in sorted(zip(members, texts, strict=True), key=lambda pair: pair[1] is None):
        up = "" if text is None else text
        is_taken = (member.role, member.name) in named
        named.add((member.role, member.name))
        name = f"{member.name}@{member.incarnation[:8]}" if is_taken else member.name
        labels = {"worker": name, "role": member.role}
        if member.HasField("model"):
            labels["model"] = member.model.name
        try:
            collected.add(f"# TYPE tandem_member_up gauge\ntandem_member_up {int(text is not None)}\n{up}", labels)
        except ValueError as error:
            log.warning("a member's metrics are malformed", member=member.name, error=str(error))
    registry = CollectorRegistry()
    registry.register(collected)
    return generate_latest(registry)


async def _fetch(placements: Placements, member: cluster_pb2.Member) -> str | None:
    stub = cluster_pb2_grpc.NodeStub(placements.channel(member.grpc_address))
    try:
        reply = await answer_of(stub.Metrics(cluster_pb2.MetricsRequest(), timeout=_MEMBER_SECONDS))
    except grpc.aio.AioRpcError as error:
        log.debug("a member does not tell its metrics", member=member.name, code=error.code().name)
        return None
    except ChannelClosed:
        return None
    return bytes(reply.text).decode(errors="replace")
