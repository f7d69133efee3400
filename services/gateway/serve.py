"""The gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import stamina.instrumentation
import structlog
import uvicorn

from services.cluster_state import ClusterState
from services.config import GatewayConfig
from services.gateway.access import Access, ApiKeys
from services.gateway.app import build_app
from services.gateway.generation import Running
from services.gateway.http_protocol import BoundedHttpProtocol
from services.gateway.intake import Intake, TextModel
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placements
from services.gateway.retries import RetryBudget
from services.gateway.token_socket import TokenSocket
from services.process import new_incarnation, stop_signal
from services.rpc import cluster_pb2
from services.rpc_server import RpcServer
from services.security import cluster_key

log = structlog.get_logger()

_GRACE_SECONDS = 3  # for running streams at the end
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield


async def serve(config: GatewayConfig) -> None:
    """Serves HTTP until SIGTERM. Raises ModelError, ConnectionError or OSError if it cannot start."""
    stop = stop_signal()
    listener = _listen(config.host, config.port)
    stamina.instrumentation.set_on_retry_hooks([])  # what is left after the retries is logged where it ends
    text = TextModel(Path(config.model))
    key = cluster_key(config.cluster_key)
    incarnation = new_incarnation()
    metrics = GatewayMetrics()
    state = ClusterState(config.state, config.cluster)
    await state.connect()
    rpc = RpcServer(config.bind, 0, key, metrics.registry)
    tokens = TokenSocket(config.bind, key)
    placements = Placements(state, key, config.worker_wait, RetryBudget(metrics))
    running = Running(placements, tokens, incarnation)
    state.on_silence(running.was_silent)
    intake = Intake(config, text, running)
    app = Access(build_app(config, intake, state, placements), ApiKeys(config.api_keys), metrics)
    server = _Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            backlog=_BACKLOG,
        )
    )
    receiving = asyncio.create_task(tokens.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await rpc.start()
        await rpc.set_healthy(True)
        await state.register(
            cluster_pb2.Member(
                name=config.name or "gateway",
                role="gateway",
                incarnation=incarnation,
                grpc_address=rpc.address,
                tokens_address=tokens.address,
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        )
        log.info("gateway listens", url=f"http://{config.host}:{listener.getsockname()[1]}", model=intake.model_name)
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, receiving, serving), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        receiving.cancel()
        await placements.close()
        await state.close()
        await rpc.stop()
        tokens.close()


def _listen(host: str, port: int) -> socket.socket:
    """The HTTP socket, bound before anything slow, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}); choose another port with --port") from error
    return listener
