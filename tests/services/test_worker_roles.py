"""Of workers that change their roles at once, one that decodes is left."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from services.cluster_state import ClusterState
from services.embedded_state import EmbeddedState
from services.process import new_incarnation
from services.rpc import cluster_pb2
from services.worker import roles
from services.worker.roles import RoleService


class SlowThread:
    """An engine thread whose step takes longer than a worker has the lock."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(on_layers=None)

    async def call(self, work: Callable[[], None]) -> None:
        await asyncio.sleep(0.6)
        work()


async def test_a_long_step_lets_no_two_workers_stop_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "_LOCK_SECONDS", 0.2)
    store, services, states = EmbeddedState(), [], []
    for number in range(2):
        state = ClusterState(store.url, "test")
        await state.connect()
        member = cluster_pb2.Member(name=f"decode-{number}", role="decode", incarnation=new_incarnation())
        member.model.name = "m"
        await state.register(member)
        states.append(state)
        thread: Any = SlowThread()
        sender: Any = SimpleNamespace(on_layers="sends")
        unused: Any = None
        services.append(RoleService(unused, member, state, thread, unused, sender))

    async def later() -> None:
        await asyncio.sleep(0.3)
        await services[1]._say("prefill", force=False)

    try:
        told = await asyncio.gather(services[0]._say("prefill", force=False), later(), return_exceptions=True)
        assert told[0] is None and isinstance(told[1], roles._Refused)
        assert [service._member.role for service in services] == ["prefill", "decode"]
        assert [service._thread.engine.on_layers for service in services] == ["sends", None]
    finally:
        for state in states:
            await state.close()
        store.close()
