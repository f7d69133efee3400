"""The process of a prefill, decode or aggregated worker."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog
import torch
import zmq
from tokenizers import Tokenizer

from engine.engine import Engine, EngineConfig, StepOutput
from engine.hashing import test_vector
from engine.memory import describe_cache
from engine.request import TIERS
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ConnectorError, PoolDescription, ReceiverConnector
from kv_transfer.connectors.shared_memory import (
    SharedSegment,
    reap_stale_segments,
)
from services.cluster_state import ClusterState
from services.config import ConfigError, WorkerConfig, parse_bytes
from services.process import new_incarnation, seconds_since_start, stop_signal
from services.rpc import cluster_pb2, trace_pb2_grpc, transfer_pb2_grpc, worker_pb2_grpc
from services.rpc_server import RpcServer
from services.security import key_of
from services.worker.connectors import can_be_written, can_move_kv, check_connector, codecs_of, offered, open_sender
from services.worker.devices import take_devices
from services.worker.draining import DrainService
from services.worker.engine_thread import HANG_SECONDS, EngineThread
from services.worker.event_publisher import EventPublisher
from services.worker.load_log import LoadLog
from services.worker.metrics import WorkerMetrics
from services.worker.prefix_costs import PrefixCosts
from services.worker.receiving import KvReceiver
from services.worker.roles import RoleService, mixed_prefill_tokens
from services.worker.sending import KvSender
from services.worker.servicer import WorkerService
from services.worker.sleeping import SleepService
from services.worker.swapping import Swapping
from services.worker.timelines import Timelines
from services.worker.token_publisher import TokenPublisher
from services.zmq_sockets import secure

log = structlog.get_logger()

_TICK_SECONDS = 0.05
_BEAT_TICKS = 10


async def serve(config: WorkerConfig) -> None:
    """Runs until SIGTERM, then drains."""
    stop = stop_signal()
    await Worker(config, stop).run()


# Starting a step's kernels keeps the interpreter busy for milliseconds, and what comes in meanwhile is taken in by
# another thread, which at Python's usual 5 ms a turn would miss the next step.
_SWITCH_SECONDS = 5e-4
_BLOCKING_THREADS = 64  # made as they are needed


class _Usual(NamedTuple):
    """What a device does well where nobody says otherwise."""

    dtype: str
    max_batched_tokens: int
    max_running: int


_USUAL = {"cpu": _Usual("float32", 512, 64), "cuda": _Usual("bfloat16", 1280, 256)}


class Worker:
    """Everything that one worker process holds, wired together."""

    def __init__(self, config: WorkerConfig, stop: asyncio.Event) -> None:
        self._config = config
        self._stop = stop
        self._key = key_of(config)
        self.incarnation = new_incarnation()
        self.metrics = WorkerMetrics()
        self._segment: SharedSegment | None = None
        self._connectors: list[ReceiverConnector] = []
        self._costs = PrefixCosts()

    async def run(self) -> None:
        """Loads, registers, serves, drains."""
        config = self._config
        sys.setswitchinterval(_SWITCH_SECONDS)
        # Each peer that takes nothing holds a thread for a while: with the usual handful it would delay all others.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_BLOCKING_THREADS, "blocking"))
        for name in reap_stale_segments():
            log.info("removed shared memory of a dead worker", segment=name)
        rpc = RpcServer(config.bind, config.rpc_port, self._key, self.metrics.registry)
        state = ClusterState(config.state, config.cluster)
        await state.connect()
        try:
            engine = await asyncio.to_thread(self._build_engine)
            await self._serve(engine, rpc, state)
        finally:
            await state.close()
            await rpc.stop()
            for connector in self._connectors:
                connector.close()
            if self._segment is not None:
                self._segment.unlink()

    def _build_engine(self) -> Engine:
        """Loads the model, sizes the pool and warms up, so that the first request is as fast as the next."""
        config = self._config
        check_connector(config)
        if config.device == "cuda":
            take_devices(config.first_device, config.tensor_parallel)
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda: torch sees no CUDA device here; `tandem doctor` says which torch this is")
        if config.connector in ("gloo", "nixl") and self._key is None:
            raise ConfigError(
                f"connector {config.connector}: it trusts whoever it is connected to, so set TANDEM_CLUSTER_KEY"
            )
        folder = Path(config.model)
        usual = _USUAL[config.device]
        # Peers reach the caches of all ranks through rank 0.
        ranks_are_reached = config.tensor_parallel > 1 and can_move_kv(config)
        is_written = config.connector == "shared_memory" or (config.role == "decode" and config.connector == "auto")
        share = config.device == "cpu" and (ranks_are_reached or (is_written and can_move_kv(config)))
        told = LoadLog()
        engine = Engine.build(
            folder,
            EngineConfig(
                block_size=config.block_size,
                num_blocks=config.kv_blocks or None,
                kv_memory=None if config.kv_memory == "auto" else parse_bytes(config.kv_memory),
                max_batched_tokens=config.max_batched_tokens or usual.max_batched_tokens,
                max_mixed_prefill_tokens=mixed_prefill_tokens(config, config.role),
                max_overtaking=config.max_overtaking,
                max_running=config.max_running or usual.max_running,
                max_model_len=config.max_model_len or None,
                vocab_size=_vocab_size(folder),
                dtype=usual.dtype if config.dtype == "auto" else config.dtype,
                quantization=config.quantization,
                kv_dtype=config.kv_dtype,
                device=config.device,
                tensor_parallel=config.tensor_parallel,
                threads=config.threads,
                dummy_seed=config.dummy_seed,
                allocate=self._allocate_segment if share else None,
            ),
            told,
            self._on_crash,
            told.stage,
        )
        spec = engine.kv_cache.spec
        log.info(
            describe_cache(engine.kv_cache.num_blocks, spec.block_size, spec.block_bytes),
            max_model_len=engine.max_model_len,
            threads=config.threads,
            **({} if engine.memory is None else {"memory": str(engine.memory)}),
        )
        if config.max_model_len > engine.max_model_len:
            log.warning("max_model_len is less than asked for", max_model_len=engine.max_model_len)
        gc.collect()
        gc.freeze()
        return engine

    def _allocate_segment(self, num_blocks: int, block_bytes: int) -> SharedSegment | None:
        try:
            self._segment = SharedSegment(num_blocks * block_bytes, num_blocks)
            return self._segment
        except ConnectorError as error:
            if self._config.connector == "shared_memory" or self._config.tensor_parallel > 1:
                raise
            log.warning("no shared memory for the KV pool: KV moves over sockets", reason=str(error))
            return None

    async def _serve(self, engine: Engine, rpc: RpcServer, state: ClusterState) -> None:
        config = self._config
        spec = engine.kv_cache.spec
        pool = PoolDescription(
            self.incarnation, engine.pages.num_blocks, spec.block_bytes, spec.layer_bytes, spec.layout
        )
        stream_key = self._key.kv_streams if self._key else b""
        self._connectors = offered(config, engine, pool, self._segment, stream_key, self._secure)
        open_connector = partial(
            open_sender, engine.kv_cache.tensor.device, stream_key, self._secure, codecs_of(config), None
        )
        thread = EngineThread(engine, self._on_step, self._on_crash)
        tokens = TokenPublisher(self.incarnation, self._key)
        self._events = EventPublisher(self.incarnation, config.bind, self._key)
        timelines = Timelines(config.name, self.incarnation)
        trace_pb2_grpc.add_TraceServicer_to_server(timelines, rpc.server)
        self._receiver = KvReceiver(
            self.incarnation,
            config.name,
            engine.fingerprint,
            spec.layout,
            thread,
            self._connectors,
            self._key,
            self.metrics,
            timelines,
            self._costs,
        )
        self._swapping = Swapping(socket.gethostname(), thread, self._receiver, self._costs)
        forced = None if config.connector == "auto" else config.connector
        self._sender = KvSender(
            self.incarnation,
            engine.fingerprint,
            spec.layout,
            thread,
            open_connector,
            tokens,
            forced,
            self.metrics,
            timelines,
            self._receiver,
        )
        self._service = WorkerService(
            self.incarnation,
            thread,
            self._receiver,
            tokens,
            self._events,
            max_model_len=engine.max_model_len,
            max_waiting=config.max_waiting,
        )
        page_sums(
            engine.pages.tensor, [0]
        )  # on a device, what computes them is compiled now: not in the first transfer
        if config.role == "prefill":
            engine.on_layers = self._sender.on_layers
        if can_move_kv(config):
            transfer_pb2_grpc.add_TransferServicer_to_server(self._sender, rpc.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, rpc.server)
        self._member = cluster_pb2.Member(
            name=config.name,
            role=config.role,
            incarnation=self.incarnation,
            grpc_address=rpc.address,
            events_address=self._events.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            fetches=self._receiver.can_fetch,
            sends=can_move_kv(config),
            gpu=torch.cuda.get_device_name() if config.device == "cuda" else "",
            gpus=config.tensor_parallel,
            model=cluster_pb2.ModelCard(
                name=config.model_name or Path(config.model).name,
                fingerprint=engine.fingerprint,
                layout=spec.layout,
                block_size=spec.block_size,
                max_model_len=engine.max_model_len,
                num_blocks=engine.kv_cache.num_blocks,
                hash_vector=test_vector(),
            ),
        )
        self._draining = DrainService(self._member, state, self._service, self._sender, self._stop)
        worker_pb2_grpc.add_DrainServicer_to_server(self._draining, rpc.server)
        roles = RoleService(config, self._member, state, thread, self._service, self._sender)
        worker_pb2_grpc.add_RoleServicer_to_server(roles, rpc.server)
        sleep = SleepService(
            self._member,
            state,
            thread,
            self._service,
            self._sender,
            self._events,
            self._key,
            self._on_crash,
            is_mapped=can_be_written(config) and config.device != "cpu",
        )
        worker_pb2_grpc.add_SleepServicer_to_server(sleep, rpc.server)
        thread.start()
        await rpc.start()
        await self._refresh_load(thread)
        self._member.start_seconds = seconds_since_start()
        await state.register(self._member)
        state.on_change(self._on_change)
        await rpc.set_healthy(True)
        log.info("ready", role=config.role, address=rpc.address)
        ticker = asyncio.get_running_loop().create_task(self._tick(thread, rpc, tokens))
        ticker.add_done_callback(self._ticker_done)
        await self._stop.wait()
        await self._drain(rpc)
        ticker.cancel()
        await self._receiver.close()
        tokens.close()
        self._events.close()
        await asyncio.to_thread(thread.stop)
        await asyncio.to_thread(engine.close)

    def _secure(self, socket: zmq.Socket[bytes], server: bool) -> None:
        secure(socket, self._key, server=server)

    def _on_step(self, output: StepOutput) -> None:
        """Event loop, after each step: tokens, events, metrics."""
        self._sender.on_step(output)
        self._service.publish(output)
        if output.events:
            self._events.publish(output.events)
        self._swapping.on_step(output.step)
        self._receiver.blocks_freed()
        self.metrics.count_step(output)
        self._costs.computed(output)

    def _on_crash(self, error: BaseException) -> None:
        """A loop that everything leans on failed: a new process starts clean."""
        log.critical("the worker failed", error=repr(error), exc_info=error)
        os.kill(os.getpid(), signal.SIGKILL)

    def _ticker_done(self, ticker: asyncio.Task[None]) -> None:
        if not ticker.cancelled() and (error := ticker.exception()) is not None:
            self._on_crash(error)

    def _on_change(self, change: str, member: cluster_pb2.Member) -> None:
        if change == "left" and member.role == "gateway":
            self._service.gateway_left(member.incarnation)
        self._swapping.on_change(change, member)

    async def _tick(self, thread: EngineThread, rpc: RpcServer, tokens: TokenPublisher) -> None:
        beats: Counter[str] = Counter()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self._receiver.tick(now)
            self._sender.tick(now)
            self._service.tick(now)
            beats["tick"] += 1
            if beats["tick"] % _BEAT_TICKS == 0:
                tokens.count()
                self._events.beat()
                await rpc.set_healthy(now - thread.last_progress < HANG_SECONDS and not self._stop.is_set())
                await self._refresh_load(thread)

    async def _refresh_load(self, thread: EngineThread) -> None:
        """Puts the engine's load into metrics and into the next heartbeat."""
        engine = thread.engine
        quarantined = self._receiver.quarantined_blocks
        stats, orphaned, links = await thread.call(
            lambda: (engine.stats(), engine.orphaned_blocks(quarantined), self.metrics.latest_links())
        )
        self._member.load.running = stats.running
        self._member.load.waiting = stats.waiting
        self._member.load.free_blocks = stats.free_blocks
        self._member.load.steps = stats.steps
        self._member.load.waiting_for_blocks = self._receiver.waiting_for_blocks
        if (rate := self._costs.prefill_rate) is not None:
            self._member.load.prefill_tokens_per_second = rate
        self._member.load.ClearField("fetch_tokens_per_second")
        if (rate := self._costs.fetched("").per_second) is not None:
            self._member.load.fetch_tokens_per_second = rate
        restored = {tier: self._costs.fetched(tier).per_second for tier in TIERS}
        self._member.load.restore_tokens_per_second.clear()
        self._member.load.restore_tokens_per_second.update(
            {tier: rate for tier, rate in restored.items() if rate is not None}
        )
        self.metrics.tell(self._member.load, links)
        self.metrics.set_load(stats, orphaned)

    async def _drain(self, rpc: RpcServer) -> None:
        """Unready first, then finish what runs, then transfers."""
        await rpc.set_healthy(False)
        await self._draining.leave()
        deadline = time.monotonic() + self._config.drain_seconds
        unfinished = await self._service.drain(self._config.drain_seconds)
        while self._sender.num_transfers and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        log.info("drained", unfinished=unfinished, transfers=self._sender.num_transfers)


def _vocab_size(folder: Path) -> int | None:
    """Ids that the tokenizer knows; a model's matrix may be padded beyond, and those ids must never be sampled."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=True) if path.exists() else None
