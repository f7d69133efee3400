"""The cluster's metrics in one text: no two members of one name share a series; and in shares: each member once."""

import asyncio
from collections import Counter as Count

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.gateway.cluster_metrics import cluster_metrics, share_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placements
from services.gateway.retries import RetryBudget
from services.rpc import cluster_pb2
from services.rpc_server import RpcServer


async def test_members_of_one_name_have_series_of_their_own() -> None:
    """On two hosts, or one that was killed beside the one that took its place."""
    store = EmbeddedState()
    servers, states = [], []
    for number, incarnation in enumerate(("c" * 32, "a" * 32, "b" * 32)):
        registry = CollectorRegistry()
        Gauge("tandem_things", "", registry=registry).set(number)
        server = RpcServer("127.0.0.1", 0, None, registry)
        await server.start()
        state = ClusterState(store.url, "test")
        await state.connect()
        member = cluster_pb2.Member(name="decode-0", role="decode", incarnation=incarnation)
        member.grpc_address = server.address
        await state.register(member)
        servers.append(server)
        states.append(state)
    await servers[1].stop(0)  # it dies, and its lease runs on
    view = ClusterState(store.url, "test")
    await view.connect()
    placements = Placements(view, None, 1.0, RetryBudget(GatewayMetrics()))
    try:
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families((await cluster_metrics(view.members(), placements)).decode()):
            for sample in family.samples:
                key = (sample.name, sample.labels["worker"])
                assert key not in found, "two values of one series"
                assert sample.labels["role"] == "decode"
                found[key] = sample.value
        assert {worker: value for (name, worker), value in found.items() if name == "tandem_member_up"} == {
            "decode-0": 1,
            "decode-0@cccccccc": 1,
            "decode-0@aaaaaaaa": 0,
        }
        assert found["tandem_things", "decode-0"] == 2 and found["tandem_things", "decode-0@cccccccc"] == 0
        await states[0].close()  # it leaves, and its series with it
        while len(view.members()) == 3:
            await asyncio.sleep(0.02)
        assert b"cccccccc" not in await cluster_metrics(view.members(), placements)
    finally:
        await placements.close()
        for each in (view, *states):
            await each.close()
        for server in (servers[0], servers[2]):
            await server.stop(0)
        store.close()


def test_shares_of_gateways_tell_of_each_member_once() -> None:
    def member(role: str, number: int) -> cluster_pb2.Member:
        return cluster_pb2.Member(role=role, incarnation=f"{role}{number:020}")

    gateways = [member("gateway", number) for number in range(3)]
    members = [*gateways, *(member("decode", number) for number in range(60))]
    shares = {gateway.incarnation: share_of(gateway.incarnation, members) for gateway in gateways}
    assert Count(m.incarnation for share in shares.values() for m in share) == Count(m.incarnation for m in members)
    assert all(len(share) > 5 for share in shares.values())
    # One is gone: its members go to the others, and nobody else's.
    left = [each for each in members if each is not gateways[0]]
    for gateway in gateways[1:]:
        share = share_of(gateway.incarnation, left)
        assert [each for each in shares[gateway.incarnation] if each not in share] in ([], [gateways[0]])
    assert share_of("nobody", members) == [] == share_of("nobody", [])
