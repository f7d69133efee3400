"""Workers that fail all they are given, though they have the best caches: they are left out, and come back healed."""

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model
from router_cluster import Worker, eventually

from engine.hashing import block_hashes, root_hash
from router.breaker import FAULTS
from services.cluster_state import ClusterState
from services.rpc import cluster_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import make_channel
from services.running import find, members_of
from services.security import ClusterKey, key_of

TOKENS = 200


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("sick")
    model = str(tiny_model(folder / "tiny"))
    options = ("--dummy-seed", "5", "--threads", "1", "--kv-memory", "64MiB", "--local-prefill-tokens", "0")
    running = start_cluster(folder, "--prefill", "1", "--decode", "1", *options, model=model)
    yield running
    stop_cluster(running)


def prompt(number: int) -> list[int]:
    return [(37 * number + 11 * i) % 40_000 + 10 for i in range(TOKENS)]


class Sick(Worker):
    """A member that says it has everybody's prompts cached, and fails; healed it hands all on to `healthy`."""

    def __init__(self, healthy: cluster_pb2.Member, key: ClusterKey | None, numbers: range) -> None:
        super().__init__(secrets.token_hex(16), healthy.role, key)
        self.submitted: list[str] = []
        self.is_healed = False
        self._healthy = healthy.incarnation
        self._channel = make_channel(healthy.grpc_address, key)
        card = healthy.model
        root = root_hash(fingerprint=card.fingerprint, layout=card.layout, block_size=card.block_size, salt="")
        self.held = [block for number in numbers for block in block_hashes(prompt(number), card.block_size, root)]
        self.member.model.CopyFrom(card)
        self.member.name = f"sick-{healthy.role}"

    async def Submit(self, request: worker_pb2.SubmitRequest, context: Any) -> worker_pb2.SubmitReply:
        self.submitted.append(request.request_id)
        if not self.is_healed:
            await context.abort(grpc.StatusCode.INTERNAL, "sick")
        request.worker_incarnation = self._healthy
        return await worker_pb2_grpc.WorkerStub(self._channel).Submit(request, timeout=30)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortReply:
        return await worker_pb2_grpc.WorkerStub(self._channel).Abort(request, timeout=30)

    async def close(self) -> None:
        await self._channel.close()
        await super().close()


@contextlib.asynccontextmanager
async def sick(cluster: Cluster, role: str, numbers: range) -> AsyncIterator[Sick]:
    """Joins such a worker, and waits until the router knows of its cache."""
    running = find(cluster.url)
    key = key_of(running)
    (healthy,) = await members_of(running, role)
    worker, state = Sick(healthy, key, numbers), ClusterState(running.state, running.cluster)
    await state.connect()
    await worker.server.start()
    await worker.server.set_healthy(True)
    try:
        await state.register(worker.member)

        async def known() -> bool:
            return worker.snapshots > 0 and await metric(cluster, "tandem_router_index_blocks") >= len(worker.held)

        await eventually(known)
        yield worker
    finally:
        await state.close()
        await worker.close()

    async def gone() -> bool:
        return await metric(cluster, "tandem_router_workers") == 2

    await eventually(gone)


async def metric(cluster: Cluster, name: str, **labels: str) -> float:
    """On another thread: the gateway asks all members, and one of them is here."""
    return await asyncio.to_thread(cluster.metric, name, **labels)


async def ask(cluster: Cluster, number: int) -> None:
    body = {"model": cluster.model, "prompt": prompt(number), "max_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=120) as client:
        answer = await client.post(cluster.url + "/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


async def left_out(cluster: Cluster) -> dict[str, str]:
    """Of the latest placement, by name."""
    running = find(cluster.url)
    (router,) = await members_of(running, "router")
    async with make_channel(router.grpc_address, key_of(running)) as channel:
        reply = await router_pb2_grpc.RouterStub(channel).Explain(router_pb2.ExplainRequest(), timeout=30)
    return {worker.name: worker.reason for worker in reply.placements[0].left_out}


def explained(cluster: Cluster) -> str:
    """What the command says of the latest placement."""
    command = [sys.executable, "-m", "services.cli", "router", "explain", "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


async def test_prompts_that_are_too_long_open_nothing(pair: Cluster) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        for _ in range(20):
            body = {"model": pair.model, "prompt": list(range(10, 3010)), "max_tokens": 4}
            answer = await client.post(pair.url + "/v1/completions", json=body)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    await ask(pair, 1000)
    assert await left_out(pair) == {}
    assert await metric(pair, "tandem_router_breakers") == 0


async def test_decode_worker_that_fails_is_left_out_and_comes_back(pair: Cluster) -> None:
    numbers = range(60)
    async with sick(pair, "decode", numbers) as worker:
        prompts = iter(numbers)

        async def shut_out() -> bool:
            await ask(pair, next(prompts))
            return "breaker" in (await left_out(pair)).get("sick-decode", "")

        while not await shut_out():
            assert len(worker.submitted) <= FAULTS + 2  # where time passes, a probe may be among them
        assert len(worker.submitted) >= FAULTS
        assert "not sick-decode: breaker" in await asyncio.to_thread(explained, pair)
        assert await metric(pair, "tandem_router_outcomes_total", outcome="worker_error") == len(worker.submitted)
        worker.is_healed = True

        async def serves() -> bool:
            before = len(worker.submitted)
            await ask(pair, next(prompts))
            return len(worker.submitted) > before

        await eventually(serves)
        for _ in range(3):
            assert await serves()
    assert await metric(pair, "tandem_retries_total") >= FAULTS


async def test_prefill_worker_that_cannot_deliver_is_parted_from_the_decode_worker(pair: Cluster) -> None:
    numbers = range(100, 140)
    before = await metric(pair, "tandem_kv_transfers_total", outcome="recomputed")
    async with sick(pair, "prefill", numbers):
        prompts = iter(numbers)
        for _ in range(FAULTS):
            await ask(pair, next(prompts))
        assert await metric(pair, "tandem_kv_transfers_total", outcome="recomputed") == before + FAULTS
        delivered = await metric(pair, "tandem_kv_transfers_total", outcome="committed")

        async def parted() -> bool:
            await ask(pair, next(prompts))
            return "pair" in (await left_out(pair)).get("sick-prefill", "")

        await eventually(parted)
        await eventually(lambda: _delivered(pair, delivered))
        assert await metric(pair, "tandem_router_breakers", of="worker") == 0


async def _delivered(cluster: Cluster, before: float) -> bool:
    return await metric(cluster, "tandem_kv_transfers_total", outcome="committed") > before
