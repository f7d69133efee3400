"""What a worker says of itself when it takes nothing new: for a while, or for good."""

from types import SimpleNamespace
from typing import Any

from services.rpc import cluster_pb2, worker_pb2
from services.worker.draining import DrainService
from services.worker.serve import Worker


class Process:
    """What of a worker drains."""

    def __init__(self) -> None:
        self.member = cluster_pb2.Member()
        self.announced: list[tuple[bool, bool]] = []  # draining, leaving
        self.service = SimpleNamespace(draining=False, admitted=(), drain=self._drained)
        self.sender = SimpleNamespace(draining=False, num_transfers=0)
        stop: Any = SimpleNamespace(set=lambda: None, is_set=lambda: False)
        state: Any = SimpleNamespace(announce=self._announce)
        service: Any = self.service
        sender: Any = self.sender
        self.draining = DrainService(self.member, state, service, sender, stop)

    async def told_to_end(self) -> None:
        """By SIGTERM."""
        worker: Any = Worker.__new__(Worker)
        worker._draining, worker._service, worker._sender = self.draining, self.service, self.sender
        worker._config = SimpleNamespace(drain_seconds=1.0)
        await worker._drain(SimpleNamespace(set_healthy=self._drained))

    async def _announce(self) -> None:
        self.announced.append((self.member.draining, self.member.leaving))

    async def _drained(self, _: float) -> int:
        return 0


async def test_who_drains_on_request_stays_a_member_and_who_is_told_to_end_does_not() -> None:
    process, context = Process(), Any
    await process.draining.Drain(worker_pb2.DrainRequest(), context)
    await process.draining.Undrain(worker_pb2.UndrainRequest(), context)
    await process.told_to_end()
    assert process.announced == [(True, False), (False, False), (True, True)]
    assert process.service.draining and process.sender.draining
