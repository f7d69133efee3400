"""The planner's process beside a cluster state: who decides, and from what it goes on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cluster_state import ClusterState
from services.config import ConfigError, PlannerConfig
from services.embedded_state import EmbeddedState
from services.planner.journal import Journal
from services.planner.serve import Planner
from services.process import new_incarnation
from services.rpc import cluster_pb2


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Of a store with one worker, which stays."""
    store = EmbeddedState()
    found = ClusterState(store.url, "test")
    await found.connect()
    worker = cluster_pb2.Member(name="aggregated-0", role="aggregated", incarnation=new_incarnation())
    worker.model.name = "m"
    await found.register(worker)
    yield store.url
    await found.close()
    store.close()


async def planner(url: str, name: str, **settings: Any) -> Planner:
    config = PlannerConfig(state=url, cluster="test", name=name, planner_interval=0.1, **settings)
    made = Planner(config, asyncio.Event())
    await made._state.connect()
    await made._tick()  # the first window tells nothing
    return made


async def numbers(url: str) -> list[int]:
    journal = Journal(url, "test", "m")
    found = [decision.number for decision in await journal.latest(100)]
    await journal.close()
    return found


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
