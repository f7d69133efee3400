"""Sleep and wake of one worker, on a real engine: callers who do not wait for the answer."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from engine.engine import Engine, EngineConfig
from engine.request import CacheCleared, KvEvent
from services.rpc import cluster_pb2, worker_pb2
from services.worker.engine_thread import EngineThread
from services.worker.sleeping import SleepService


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder: Path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return Engine.build(folder, EngineConfig(num_blocks=4, threads=1, dummy_seed=1))


class State:
    """Where the worker would tell the cluster about itself."""

    async def announce(self) -> None:
        """Nobody is there."""

    def members(self, *roles: str) -> list[cluster_pb2.Member]:
        """Nobody."""
        return []


async def test_a_caller_who_goes_away_leaves_a_worker_that_knows_whether_it_sleeps(engine: Engine) -> None:
    told: list[KvEvent] = []
    crashed: list[BaseException] = []
    thread = EngineThread(engine, lambda output: None, crashed.append)
    member = cluster_pb2.Member(name="decode-0")
    service: Any = SimpleNamespace(draining=False, asleep=False, admitted={})
    sender: Any = SimpleNamespace(asleep=False, num_transfers=0)
    events: Any = SimpleNamespace(publish=told.extend)
    state: Any = State()
    context: Any = None
    sleep = SleepService(member, state, thread, service, sender, events, None, crashed.append)
    thread.start()
    in_a_step, step_ends = threading.Event(), threading.Event()
    thread.post(lambda: (in_a_step.set(), step_ends.wait()))
    await asyncio.to_thread(in_a_step.wait)

    caller = asyncio.ensure_future(sleep.Sleep(worker_pb2.SleepRequest(), context))
    while not member.asleep:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # its call waits for the engine by now
    caller.cancel()
    await asyncio.sleep(0.01)
    step_ends.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert engine.asleep and member.asleep and service.asleep and sender.asleep
    assert told == [CacheCleared()]
    assert not (await sleep.Wake(worker_pb2.WakeRequest(), context)).was_awake
    assert not (engine.asleep or member.asleep or service.asleep or sender.asleep)
    thread.stop()
    assert crashed == []
