"""A prefill and a decode worker with mock engines and everything else real, and proxies on all ways between them."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import grpc.aio
import msgspec
import torch
import xxhash
from chaos.control_proxy import ControlProxy
from chaos.faults import Faults
from chaos.faulty_sender import FaultySender
from chaos.mock_engine import BLOCK, FINGERPRINT, MockEngine
from chaos.stream_proxy import StreamProxy, pair_units, tcp_units, zmtp_units

from engine.engine import StepOutput
from engine.request import Request, SamplingParams
from kv_transfer import checksums
from kv_transfer.connectors import process_group, tcp_wire, zmq_stream
from kv_transfer.connectors.base import ConnectorError, PoolDescription, ReceiverConnector, SenderConnector
from kv_transfer.connectors.distributed import DistributedReceiver, DistributedSender
from kv_transfer.connectors.nixl import NixlReceiver, NixlSender
from kv_transfer.connectors.shared_memory import SharedMemoryReceiver, SharedMemorySender, SharedSegment
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.connectors.zmq_stream import ZmqReceiver, ZmqSender
from kv_transfer.messages import Done
from services.process import new_incarnation
from services.rpc import cluster_pb2, router_pb2, transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.rpc_server import RpcServer
from services.worker import links, prefix_costs, receiving
from services.worker.engine_thread import EngineThread
from services.worker.event_publisher import EventPublisher
from services.worker.incoming import Receiving
from services.worker.metrics import WorkerMetrics
from services.worker.prefix_costs import PrefixCosts
from services.worker.receiving import KvReceiver
from services.worker.sending import KvSender
from services.worker.servicer import WorkerService
from services.worker.swapping import Swapping
from services.worker.timelines import Timelines
from services.worker.token_publisher import TokenPublisher

CONNECTORS = ("shared_memory", "zmq", "tcp")
LEASE_SECONDS = 0.8
PATIENT = 20.0  # seconds of lease where no fault is to end one, however busy the machine is
_KEY = b"k" * 32  # of pairs
_UNITS = {"zmq": zmtp_units, "gloo": pair_units, "nixl": pair_units}
_TICK_SECONDS = 0.02
_HOST = "127.0.0.1"


@contextlib.contextmanager
def short_waits(lease_seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """All waits of the transfer path shortened, so that thousands of lost words fit into minutes."""
    with (
        mock.patch.object(receiving, "_LEASE_SECONDS", lease_seconds),
        mock.patch.object(links, "_CONNECT_SECONDS", 1.0),
        mock.patch.object(links, "_PAUSE_SECONDS", 0.0),
        mock.patch.object(receiving, "_LATE_BYTES_SECONDS", 0.5),
        mock.patch.object(prefix_costs, "_ASSUMED", 40.0),
        mock.patch.object(zmq_stream, "_STUCK_SECONDS", 0.5),
        mock.patch.object(tcp_wire, "STUCK_SECONDS", 0.5),
        mock.patch.object(process_group, "STUCK_SECONDS", 0.5),
    ):
        yield


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Negative control: all sums of KV bytes are equal."""
    blind = SimpleNamespace(xxh3_64_intdigest=lambda data: 0)
    assert zmq_stream.xxhash is xxhash
    with mock.patch.object(zmq_stream, "xxhash", blind), mock.patch.object(checksums, "_sum_of", lambda row: 0):
        yield


OnCrash = Callable[[Exception], None]
Verify = Callable[[Receiving, Done], Awaitable[None]]


class Worker:
    """What both have: an engine on its thread and a gRPC server."""

    def __init__(self, engine: MockEngine, on_crash: OnCrash) -> None:
        self.incarnation = new_incarnation()
        self.engine = engine
        self.metrics = WorkerMetrics()
        self.rpc = RpcServer(_HOST, 0, None, self.metrics.registry)
        self.tokens = TokenPublisher(self.incarnation, None)
        self.timelines = Timelines(type(self).__name__, self.incarnation)
        self.costs = PrefixCosts()  # nothing is measured: a fetch may take as long as a slow worker would compute
        self.thread = EngineThread(engine, self.on_step, on_crash)
        spec = engine.kv_cache.spec
        num_blocks = engine.kv_cache.num_blocks
        self.pool = PoolDescription(self.incarnation, num_blocks, spec.block_bytes, spec.layer_bytes, spec.layout)

    def receive_by(self, connectors: list[ReceiverConnector]) -> KvReceiver:
        return KvReceiver(
            self.incarnation,
            type(self).__name__,
            FINGERPRINT,
            self.pool.layout,
            self.thread,
            connectors,
            None,
            self.metrics,
            self.timelines,
            self.costs,
        )

    def on_step(self, output: StepOutput) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.thread.start()
        await self.rpc.start()

    async def stop(self) -> None:
        await self.rpc.stop(0)
        await asyncio.to_thread(self.thread.stop)
        self.tokens.close()


class Prefill(Worker):
    """Computes prompts; 2 ms a layer, so that there is a time in the middle."""

    def __init__(
        self,
        open_connector: Callable[[str, str, bytes], SenderConnector],
        forced: str | None,
        block_size: int,
        on_crash: OnCrash,
    ) -> None:
        super().__init__(MockEngine(256 * BLOCK // block_size, 0.002, block_size=block_size), on_crash)
        self._numbers = itertools.count()
        self._connector = TcpReceiver(self.engine.kv_cache.tensor, self.pool, self.engine.generation, _HOST, b"")
        self.receiver = self.receive_by([self._connector])
        self.sender = KvSender(
            self.incarnation,
            FINGERPRINT,
            self.pool.layout,
            self.thread,
            open_connector,
            self.tokens,
            forced,
            self.metrics,
            self.timelines,
            self.receiver,
        )
        self.engine.on_layers = self.sender.on_layers
        transfer_pb2_grpc.add_TransferServicer_to_server(self.sender, self.rpc.server)

    def on_step(self, output: StepOutput) -> None:
        self.sender.on_step(output)
        self.receiver.blocks_freed()

    async def stop(self) -> None:
        await self.receiver.close()
        await super().stop()
        self._connector.close()

    async def cache(self, prompt: list[int]) -> None:
        """Computes a prompt for nobody."""
        key = f"cached {next(self._numbers)}"
        request = Request(request_id=key, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1))
        await self.thread.call(lambda: self.engine.add(request))
        while await self.thread.call(lambda: key in self.engine._scheduler.sequences):
            await asyncio.sleep(0.001)


class Decode(Worker):
    """Its pool is small, so that blocks are soon somebody else's. Offers `kinds` of connectors, best first."""

    def __init__(self, kinds: Sequence[str], on_crash: OnCrash) -> None:
        self.segment: SharedSegment | None = None
        super().__init__(MockEngine(160, 0.0003, self._allocate if "shared_memory" in kinds else None), on_crash)
        self.connectors = [self._make(kind) for kind in kinds]
        self.connector = self.connectors[0]
        self.receiver = self.receive_by(self.connectors)
        self.swapping = Swapping(_HOST, self.thread, self.receiver, self.costs)
        self.events = EventPublisher(self.incarnation, _HOST, None)
        self.service = WorkerService(
            self.incarnation,
            self.thread,
            self.receiver,
            self.tokens,
            self.events,
            max_model_len=self.engine.max_model_len,
            max_waiting=1000,
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self.service, self.rpc.server)

    def _make(self, kind: str) -> ReceiverConnector:
        tensor, pool, generation = self.engine.kv_cache.tensor, self.pool, self.engine.generation
        if kind == "shared_memory":
            assert self.segment is not None
            return SharedMemoryReceiver(self.segment, pool)
        if kind == "gloo":
            return DistributedReceiver(tensor, pool, generation, _HOST, _KEY)
        if kind == "nixl":
            return NixlReceiver(tensor, pool, generation, _HOST, _KEY)
        if kind == "zmq":
            return ZmqReceiver(tensor, pool, generation, _HOST, _insecure)
        return TcpReceiver(tensor, pool, generation, _HOST, b"")

    def _allocate(self, num_blocks: int, block_bytes: int) -> SharedSegment:
        self.segment = SharedSegment(num_blocks * block_bytes, num_blocks)
        return self.segment

    def on_step(self, output: StepOutput) -> None:
        self.service.publish(output)
        self.swapping.on_step(output.step)
        self.receiver.blocks_freed()

    async def stop(self) -> None:
        await self.receiver.close()
        await super().stop()
        for connector in self.connectors:
            connector.close()
        self.events.close()


class Pair:
    """The two workers, linked by `connector` through proxies that do what `faults` says.

    They may fall back to `others`, to which nothing happens, unless the prefill worker has a connector `forced` on it.
    `fenced=False` is the negative control: blocks are never struck out and references are not looked at.
    """

    def __init__(
        self,
        connector: str,
        faults: Faults,
        *,
        others: Sequence[str] = (),
        forced: str | None = None,
        fenced: bool = True,
        prefill_block_size: int = BLOCK,
    ) -> None:
        self.kind = connector
        self._others = others
        self._forced = forced
        self._prefill_block_size = prefill_block_size
        self.faults = faults
        self.crashes: list[Exception] = []
        self.crashed = asyncio.Event()
        self._fenced = fenced
        faults.states = self.states

    async def start(self) -> None:
        self.decode = Decode((self.kind, *self._others), self._crash)
        self.prefill = Prefill(self._open_connector, self._forced, self._prefill_block_size, self._crash)
        self.control = ControlProxy(self.faults)
        self.stream = StreamProxy(self.faults, _UNITS.get(self.kind, tcp_units))
        if not self._fenced:
            self.decode.connector.finish = lambda transfer_id: None  # type: ignore[method-assign]
        self.decode.receiver._verify = partial(self._slowly, self.decode.receiver._verify)  # type: ignore[method-assign]
        await self._put_between()
        await self.decode.start()
        await self.prefill.start()
        await self.control.start(self.prefill.rpc.address)
        self.ticker = asyncio.create_task(self._tick())
        self._channel = grpc.aio.insecure_channel(self.decode.rpc.address)
        self.worker: Any = worker_pb2_grpc.WorkerStub(self._channel)

    async def stop(self) -> None:
        self.ticker.cancel()
        await self._channel.close()
        await self.decode.stop()
        await self.prefill.stop()
        await self.control.stop()
        await self.stream.stop()

    @property
    def endpoint(self) -> router_pb2.Endpoint:
        """Where the decode worker believes the prefill worker to be."""
        return router_pb2.Endpoint(name="prefill", incarnation=self.prefill.incarnation, address=self.control.address)

    async def submit(
        self, name: str, prompt: list[int], max_tokens: int, reply_to: str = "tcp://127.0.0.1:1", **more: Any
    ) -> None:
        """Gives the decode worker a request, with `more` fields of it. Its tokens go to nobody, or to `reply_to`."""
        request = worker_pb2.SubmitRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=worker_pb2.Sampling(max_tokens=max_tokens),
            reply_to=reply_to,
            gateway_incarnation="g" * 32,
            worker_incarnation=self.decode.incarnation,
            **({"deadline_seconds": 20} | more),
        )
        await self.worker.Submit(request, timeout=10)

    def name_kept(self) -> None:
        """Has the decode worker take the prefill worker for the KV service."""
        card = cluster_pb2.ModelCard(fingerprint=FINGERPRINT, layout=self.prefill.pool.layout)
        service = cluster_pb2.Member(
            name="kv",
            role="kv",
            incarnation=self.prefill.incarnation,
            grpc_address=self.control.address,
            model=card,
        )
        self.decode.swapping.on_change("joined", service)

    def states(self, transfer_id: str) -> tuple[str, str]:
        """Of receiver and sender; they read what the event loop writes, which is good enough for counting."""
        if transfer_id in ("handshake", "?"):
            return transfer_id, transfer_id
        received = self.decode.receiver._transfers.get(transfer_id)
        sent = self.prefill.sender._sending.get(transfer_id)
        buried = (self.decode.incarnation, transfer_id) in self.prefill.sender._transfers._tombstones
        return (
            received.machine.state.value if received else "closed",
            sent.machine.state.value if sent else "closed" if buried else "before",
        )

    def _crash(self, error: Exception) -> None:
        """An engine's thread has ended; in a real worker this ends the process."""
        self.crashes.append(error)
        self.crashed.set()

    async def leftovers(self) -> dict[str, int]:
        """What must be 0 when nothing is under way."""
        decode, prefill = self.decode, self.prefill
        quarantined = decode.receiver.quarantined_blocks
        return {
            "blocks held by decode": await decode.thread.call(lambda: decode.engine.held_blocks_of_anybody),
            "blocks held by prefill": await prefill.thread.call(lambda: prefill.engine.held_blocks_of_anybody),
            "orphans": await decode.thread.call(lambda: decode.engine.orphaned_blocks(quarantined)),
            "quarantined": len(quarantined),
            "transfers of decode": len(decode.receiver._transfers),
            "transfers of prefill": prefill.sender.num_transfers + len(prefill.receiver._transfers),
            "exports": len(prefill.sender._exports),
            "requests": len(decode.service.admitted),
            "turns": len(decode.receiver._room._turns),
        }

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.decode.receiver.tick(loop.time())
            self.prefill.receiver.tick(loop.time())
            self.prefill.sender.tick(loop.time())

    async def _slowly(self, verify: Verify, receiving: Receiving, done: Done) -> None:
        """Verifies; at times so late that leases, repetitions, aborts and other faults come before."""
        if self.faults.draw("verify"):
            self.faults.count("verify", "delay", receiving.machine.transfer_id)
            await asyncio.sleep(self.faults.random.choice((0.02, 0.2, LEASE_SECONDS)))
        await verify(receiving, done)

    async def _put_between(self) -> None:
        """The stream proxy takes the place of the address in the connector's description."""
        if self.kind == "shared_memory":
            return
        description = msgspec.msgpack.decode(self.decode.connector.describe())
        if self.kind == "zmq":
            await self.stream.start(_HOST, int(description["address"].rpartition(":")[2]))
            description["address"] = f"tcp://{_HOST}:{self.stream.port}"
        else:
            await self.stream.start(_HOST, description["port"])
            description["port"] = self.stream.port
        changed = msgspec.msgpack.encode(description)
        self.decode.connector.describe = lambda: changed  # type: ignore[method-assign]

    def _open_connector(self, layout: str, kind: str, description: bytes) -> SenderConnector:
        if kind in self._others:
            return _stream_sender(layout, kind, description)
        if kind != self.kind:
            raise ConnectorError("another kind is tested")
        if kind == "shared_memory":
            memory = SharedMemorySender(description, layout)
            table = memory._segment.generations
            present = None if self._fenced else lambda block: int(table[block])
            return FaultySender(memory, self.faults, self._later, present)
        return FaultySender(_stream_sender(layout, kind, description), self.faults, self._later, None)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        thread, loop = self.prefill.thread, self.prefill.thread._loop
        loop.call_soon_threadsafe(loop.call_later, seconds, thread.post, call)


def _stream_sender(layout: str, kind: str, description: bytes) -> SenderConnector:
    match kind:
        case "gloo":
            return DistributedSender(description, layout, _KEY, torch.device("cpu"))
        case "nixl":
            return NixlSender(description, layout, _KEY, torch.device("cpu"))
        case "zmq":
            return ZmqSender(description, layout, _insecure)
    return TcpSender(description, layout, b"")


def _insecure(socket: object, server: bool) -> None:
    """No keys."""


@contextlib.asynccontextmanager
async def linked(
    connector: str,
    faults: Faults,
    *,
    others: Sequence[str] = (),
    forced: str | None = None,
    fenced: bool = True,
    prefill_block_size: int = BLOCK,
    lease_seconds: float | None = None,
) -> AsyncIterator[Pair]:
    """A pair with short waits, while it is needed. Without faults leases are long ones unless told."""
    with short_waits(lease_seconds or (LEASE_SECONDS if faults.rates else PATIENT)):
        pair = Pair(
            connector, faults, others=others, forced=forced, fenced=fenced, prefill_block_size=prefill_block_size
        )
        await pair.start()
        try:
            yield pair
        finally:
            await pair.stop()
