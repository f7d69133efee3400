"""The planner's process beside a cluster state: who decides, and from what it goes on."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from planner.decision import Action, Decision, Option
from planner.window import Window
from services.cluster_state import ClusterState
from services.config import ConfigError, PlannerConfig
from services.embedded_state import EmbeddedState
from services.gateway.decisions import Decisions
from services.gateway.metrics import GatewayMetrics
from services.plan_explain import _picture
from services.planner import observe
from services.planner.actuators import NoActuator
from services.planner.journal import Journal
from services.planner.serve import Planner
from services.planner.wanted import Wanted
from services.process import new_incarnation
from services.rpc import cluster_pb2
from services.rpc_server import RpcServer


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway is waited for: on a busy machine it may not answer within a second."""
    monkeypatch.setattr(observe, "_ANSWER_SECONDS", 30.0)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Of a store with one worker, which stays."""
    store = EmbeddedState()
    async with member(store.url, "aggregated-0", "aggregated"):
        yield store.url
    store.close()


@contextlib.asynccontextmanager
async def member(url: str, name: str, role: str, **fields: Any) -> AsyncIterator[None]:
    """Of a store, as long as the block lasts."""
    state = ClusterState(url, "test")
    await state.connect()
    added = cluster_pb2.Member(name=name, role=role, incarnation=new_incarnation(), **fields)
    if role != "gateway":
        added.model.name = "m"
    await state.register(added)
    yield
    await state.close()


@contextlib.asynccontextmanager
async def gateway(url: str) -> AsyncIterator[GatewayMetrics]:
    """One that serves `m`, or what of it a planner sees."""
    metrics = GatewayMetrics()
    metrics.serves(["m"])
    rpc = RpcServer("127.0.0.1", 0, None, metrics.registry)
    await rpc.start()
    async with member(url, "gateway", "gateway", grpc_address=rpc.address):
        yield metrics
    await rpc.stop(0)


async def planner(url: str, name: str, **settings: Any) -> Planner:
    config = PlannerConfig(state=url, cluster="test", name=name, planner_interval=0.1, **settings)
    made = Planner(config, asyncio.Event())
    await made._state.connect()
    await made._tick()  # the first window tells nothing
    return made


async def told(url: str) -> list[Decision]:
    journal = Journal(url, "test", "m")
    found = await journal.latest(100)
    await journal.close()
    return found


async def tell(url: str, **fields: Any) -> None:
    """A decision of a planner before."""
    journal = Journal(url, "test", "m")
    plain = Decision(number=1, at=1.0, model="m", window=Window(at=1.0, seconds=1.0), reason="told")
    await journal.write(msgspec.structs.replace(plain, **fields))
    await journal.close()


async def numbers(url: str) -> list[int]:
    return [decision.number for decision in await told(url)]


async def end(*planners: Planner) -> None:
    for each in planners:
        for model in each._models.values():
            await model.journal.close()
        await each._state.close()


async def test_a_standby_goes_on_where_the_leader_ended(url: str) -> None:
    leader, standby = await planner(url, "one"), await planner(url, "two")
    leader._models["m"].begins = 0.0
    for _ in range(5):
        await leader._tick()
        await standby._tick()
    assert await numbers(url) == [1, 2, 3, 4, 5]
    await leader._models["m"].lease.give_back()
    await standby._tick()
    await standby._tick()
    assert await numbers(url) == [1, 2, 3, 4, 5, 6, 7]
    await end(leader, standby)


async def test_one_that_was_killed_does_not_refuse_its_successor_of_the_same_name(url: str) -> None:
    killed = await planner(url, "one")
    again = await planner(url, "one", planner_ttft=1.0)
    member = cluster_pb2.Member(name="one", role="planner", incarnation=again._incarnation)
    await again._state.register(member)
    await again._tick()
    assert not await numbers(url)  # it waits
    await killed._models["m"].lease.give_back()
    await again._tick()
    assert again._models["m"].leads
    await end(killed, again)


async def test_channels_of_members_that_left_are_closed(url: str) -> None:
    one = await planner(url, "one")
    gone = one._channel("127.0.0.1:1")
    await one._tick()
    assert not one._channels and gone is not one._channel("127.0.0.1:1")
    await end(one)


@pytest.mark.parametrize("wrong", ['{"timing": {"step": 0.0}}', '{"timing": {}, "gpus": 0}'])
async def test_a_profile_by_which_nothing_can_be_divided_is_refused(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(wrong)
    with pytest.raises(ConfigError, match="there can be"):
        Planner(PlannerConfig(state="redis://127.0.0.1:1", planner_profile=str(file)), asyncio.Event())


AT_REST = {
    "planner": "act",
    "planner_actuator": "local",
    "planner_minimum": "aggregated=0",
    "planner_workers": 1,
    "planner_roles": "aggregated",
}


@pytest.mark.parametrize("before", ["rests", "serves", "unknown"])
async def test_a_model_at_rest_is_woken_by_whoever_decides_after_a_restart(before: str) -> None:
    store = EmbeddedState()
    if before != "unknown":
        await tell(store.url, have={"aggregated": int(before == "serves")})
    async with gateway(store.url) as metrics:
        one = await planner(store.url, "one", **AT_REST)
        await one._tick()
        wanted = Wanted(store.url, "test")
        assert not await wanted.all()
        metrics.turned_away.labels("m").inc()
        await one._tick()
        # That of which nobody knows that it rests may be about to start: nothing is started twice.
        assert [wish.what for wish in (await wanted.all()).values()] == ["run"] * (before == "rests")
        state = ClusterState(store.url, "test")
        shown = msgspec.json.decode(await Decisions(state, store.url, "test", ("m",)).latest(10))
        assert len(shown.get("m", [])) == {"rests": 3, "serves": 1, "unknown": 0}[before]
        await wanted.close()
        await end(one)
    store.close()


@pytest.mark.parametrize(("minimum", "before", "known"), [("decode=1", 0, True), ("", 1, True), ("", 0, False)])
async def test_where_all_that_starts_is_told_of_a_model_needs_no_more_than_a_reason(
    minimum: str, before: int, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Kubernetes nothing is started twice: a minimum is a reason, or that somebody has decided about it before."""
    monkeypatch.setattr(Planner, "_make_actuator", lambda _: NoActuator())
    store = EmbeddedState()
    if before:
        await tell(store.url, have={"decode": 1})
    async with gateway(store.url):
        one = await planner(store.url, "one", planner_actuator="kubernetes", planner_minimum=minimum)
        await one._tick()
        assert ("m" in one._models) is known
        await end(one)
    store.close()


async def test_as_many_workers_as_there_were_at_once_outlast_who_saw_them(url: str) -> None:
    async with member(url, "aggregated-1", "aggregated", gpus=2), member(url, "aggregated-2", "aggregated", gpus=2):
        one = await planner(url, "one")
        one._models["m"].begins = 0.0
        await one._tick()
        await one._models["m"].lease.give_back()
        await end(one)
    assert [decision.most for decision in await told(url)] == [5]
    again = await planner(url, "two")
    assert (await again._pools("m")).gpus == 5
    await again._models["m"].lease.give_back()
    flips = await planner(url, "three", planner="act", planner_actuator="none")  # nobody would start them again
    assert (await flips._pools("m")).gpus == 1
    await end(again, flips)


async def test_what_a_worker_is_outlasts_the_last_one() -> None:
    store = EmbeddedState()
    await tell(store.url, have={"aggregated": 0}, chosen=Option(tensor_parallel=4), most=8)
    async with gateway(store.url):
        one = await planner(store.url, "one", **AT_REST | {"planner_workers": 3})
        await one._tick()
        assert (await one._pools("m")).gpus == 12
        assert one._settings_of("m").offers[0].gpus == 4
        await end(one)
    store.close()


async def test_what_came_of_a_decision_is_told_with_it(url: str) -> None:
    async with gateway(url) as metrics:
        one = await planner(url, "one", planner_ttft=1.0)
        one._models["m"].begins = 0.0
        await one._tick()
        metrics.choices.labels("m").inc(4)
        for seconds in (0.5, 0.5, 0.5, 2.0):
            metrics.ttft.labels("m").observe(seconds)
        await one._tick()
        await one._tick()  # nothing came: of the decision before nothing is known
        first, second, third = await told(url)
        assert first.outcome is not None and first.outcome.attained == 0.75
        assert second.outcome is None and third.outcome is None and second.window.attained == 0.75
        console = Console(width=200)
        with console.capture() as shown:
            console.print(_picture(first))
        assert "then 75.0 % kept to the objectives" in shown.get() and "done:" not in shown.get()
        await end(one)


async def test_what_came_is_told_beside_what_became_of_the_actions(url: str) -> None:
    async with gateway(url) as metrics:
        one = await planner(url, "one", **AT_REST | {"planner_minimum": "aggregated=2", "planner_workers": 2})
        one._models["m"].begins = 0.0
        await one._tick()
        metrics.ttft.labels("m").observe(0.5)
        await one._tick()
        first = (await told(url))[0]
        assert first.actions == (Action(kind="add", role="aggregated"),)
        assert first.outcome is not None and (first.outcome.done, first.outcome.attained) == (1, 1.0)
        await end(one)
