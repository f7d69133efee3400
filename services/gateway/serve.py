"""The gateway process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import stamina.instrumentation
import structlog
import uvicorn
from starlette.types import ASGIApp

from services.cluster_state import ClusterState
from services.config import GatewayConfig
from services.gateway.access import Access
from services.gateway.admin import AdminAccess, build_admin
from services.gateway.app import build_app
from services.gateway.console.routes import Console
from services.gateway.console.state import LiveState
from services.gateway.decisions import Decisions
from services.gateway.generation import Running
from services.gateway.http_protocol import BoundedHttpProtocol
from services.gateway.intake import Intake
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.pins import Pins
from services.gateway.placement import Placements
from services.gateway.rates import Rates
from services.gateway.retries import RetryBudget
from services.gateway.token_socket import TokenSocket
from services.process import new_incarnation, stop_signal
from services.rpc import cluster_pb2
from services.rpc_server import RpcServer
from services.security import key_of

log = structlog.get_logger()

_ADMIN_GRACE_SECONDS = 1  # for whoever watches the end
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: the process has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Takes none."""
        yield


async def serve(config: GatewayConfig) -> None:
    """Serves HTTP until SIGTERM. Raises ModelError, ConfigError, ConnectionError or OSError if it cannot start."""
    stop = stop_signal()
    keys = ApiKeys(config.api_keys, Path(config.api_keys_file) if config.api_keys_file else None)
    listener = _listen(config.host, config.port, "--port")
    admin_listener = _listen(config.admin_host, config.admin_port, "--admin-port")
    stamina.instrumentation.set_on_retry_hooks([])  # what is left after the retries is logged where it ends
    models = Models(config)
    key = key_of(config)
    incarnation = new_incarnation()
    metrics = GatewayMetrics()
    metrics.serves(models)
    state = ClusterState(config.state, config.cluster)
    await state.connect()
    rpc = RpcServer(config.bind, config.rpc_port, key, metrics.registry)
    tokens = TokenSocket(config.bind, key)
    placements = Placements(state, key, config.worker_wait, RetryBudget(metrics))
    running = Running(placements, tokens, incarnation)
    state.on_silence(running.was_silent)
    state.on_change(models.on_change)
    intake = Intake(config, models, running, metrics)
    rates = Rates(lambda: len(state.members("gateway")))
    app = build_app(config, models, intake, placements, Pins(state, placements))
    server = _server(Access(app, keys, rates, metrics), config.drain_seconds)
    live = LiveState(config.cluster, incarnation, tuple(models), state, placements, metrics, running.waterfalls)
    decisions = Decisions(state, config.state, config.cluster, tuple(models))
    console = Console(live, decisions, Access(app, ApiKeys(""), rates, metrics))
    admin = _server(
        AdminAccess(build_admin(incarnation, state, placements, console, decisions), config.admin_key, metrics),
        _ADMIN_GRACE_SECONDS,
    )
    sampling = asyncio.create_task(live.history.run())
    receiving = asyncio.create_task(tokens.run())
    following = asyncio.create_task(keys.follow())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, keys.reload)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    administering = asyncio.create_task(admin.serve(sockets=[admin_listener]))
    try:
        await rpc.start()
        await rpc.set_healthy(True)
        await state.register(
            cluster_pb2.Member(
                name=config.name,
                role="gateway",
                incarnation=incarnation,
                grpc_address=rpc.address,
                tokens_address=tokens.address,
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        )
        log.info("gateway listens", url=_url(listener), admin=_url(admin_listener), model=", ".join(models))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((stopped, receiving, serving, administering), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        console.close()
        admin.should_exit = True  # the last to go: what drains can be watched
        await administering
    finally:
        receiving.cancel()
        following.cancel()
        sampling.cancel()
        await placements.close()
        await state.close()
        await rpc.stop()
        tokens.close()


def _server(app: ASGIApp, grace: float) -> _Server:
    """At the end it takes nothing new, and what runs has `grace` seconds to finish."""
    return _Server(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(grace),
            backlog=_BACKLOG,
        )
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int, flag: str) -> socket.socket:
    """An HTTP socket, bound before anything slow, so that a taken port is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port} ({error.strerror}); choose another port with {flag}") from error
    return listener
