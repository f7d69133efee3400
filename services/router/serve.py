"""The router process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

import structlog

from services.cluster_state import ClusterState
from services.config import RouterConfig
from services.process import stop_signal
from services.router.load_stream import LoadStream
from services.router.service import RouterService
from services.rpc import cluster_pb2, router_pb2_grpc
from services.rpc_server import RpcServer
from services.security import key_of

log = structlog.get_logger()


async def serve(config: RouterConfig) -> None:
    """Runs until SIGTERM."""
    stop = stop_signal()
    key = key_of(config)
    service = RouterService(config, key)
    rpc = RpcServer(config.bind, config.rpc_port, key, service.metrics.registry)
    router_pb2_grpc.add_RouterServicer_to_server(service, rpc.server)
    state = ClusterState(config.state, config.cluster)
    await state.connect()
    state.on_change(service.on_change)
    stream = LoadStream(config.state, config.cluster, service.shared, service.news, service.hear)
    sharing = asyncio.ensure_future(stream.run())
    await rpc.start()
    await state.register(
        cluster_pb2.Member(
            name=config.name,
            role="router",
            incarnation=service.incarnation,
            grpc_address=rpc.address,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
    )
    await rpc.set_healthy(True)
    log.info("ready", role="router", address=rpc.address, policy=config.policy)
    while not stop.is_set():
        service.tick(time.monotonic(), connected=state.connected)
        if sharing.done():
            sharing.result()  # raises what must not go unnoticed
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 1.0)
    await state.close()
    sharing.cancel()
    await stream.close()
    await rpc.stop()
