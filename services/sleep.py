"""`tandem sleep` and `tandem wake`: workers of a running cluster give their memory back and take it again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc
import grpc.aio

from services.config import ConfigError
from services.rpc import cluster_pb2, worker_pb2, worker_pb2_grpc
from services.rpc_server import make_channel
from services.running import RunningCluster, members_of
from services.security import key_of

_ROLES = ("prefill", "decode", "aggregated")
_ANSWER_SECONDS = 120.0  # weights move, graphs are captured

Ask = Callable[[worker_pb2_grpc.SleepStub], Awaitable[str]]


async def sleep(running: RunningCluster, names: Sequence[str], drain: bool, timeout: float) -> None:
    """Puts the workers of these names to sleep, or all, and prints a line for each. Raises SystemExit if one refuses.

    `drain`: those that are busy finish first, within `timeout` seconds. Raises ConfigError for unknown names.
    """

    async def ask(stub: worker_pb2_grpc.SleepStub) -> str:
        request = worker_pb2.SleepRequest(drain=drain, timeout_seconds=timeout if drain else 0)
        reply = await stub.Sleep(request, timeout=request.timeout_seconds + _ANSWER_SECONDS)
        return "asleep already" if reply.was_asleep else f"asleep after {reply.seconds:.2f} s"

    await _ask_all(running, names, ask)


async def wake(running: RunningCluster, names: Sequence[str]) -> None:
    """Wakes the workers of these names, or all; see `sleep`."""

    async def ask(stub: worker_pb2_grpc.SleepStub) -> str:
        reply = await stub.Wake(worker_pb2.WakeRequest(), timeout=_ANSWER_SECONDS)
        return "awake already" if reply.was_awake else f"awake after {reply.seconds:.2f} s"

    await _ask_all(running, names, ask)


async def _ask_all(running: RunningCluster, names: Sequence[str], ask: Ask) -> None:
    key = key_of(running)
    workers = _chosen(await members_of(running, *_ROLES), names)

    async def one(worker: cluster_pb2.Member) -> bool:
        async with make_channel(worker.grpc_address, key) as channel:
            try:
                print(f"{worker.name}: {await ask(worker_pb2_grpc.SleepStub(channel))}", flush=True)
            except grpc.aio.AioRpcError as error:
                print(f"{worker.name}: refuses: {error.details() or error.code().name}", flush=True)
                return False
        return True

    if not all(await asyncio.gather(*(one(worker) for worker in workers))):
        raise SystemExit(1)


def _chosen(workers: list[cluster_pb2.Member], names: Sequence[str]) -> list[cluster_pb2.Member]:
    workers = sorted(workers, key=lambda worker: worker.name)
    known = [worker.name for worker in workers]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no worker {unknown[0]!r}; there are: {', '.join(known) or 'none'}")
    return [worker for worker in workers if not names or worker.name in names]
