"""`tandem probe` against a gRPC server of the cluster."""

import asyncio
import os
import sys

from prometheus_client import CollectorRegistry

from services.rpc_server import RpcServer
from services.security import ClusterKey

KEY = "k" * 32


async def probe(port: int | str) -> tuple[int | None, str]:
    """Exit status and what was said; it needs no key."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "probe"),
        env=os.environ | {"TANDEM_BIND": "127.0.0.1", "TANDEM_RPC_PORT": str(port)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_status_follows_health() -> None:
    server = RpcServer("127.0.0.1", 0, ClusterKey(KEY), CollectorRegistry())
    port = int(server.address.rpartition(":")[2])
    await server.start()
    assert await probe(port) == (1, f"127.0.0.1:{port}: not healthy\n")
    await server.set_healthy(True)
    assert await probe(port) == (0, f"127.0.0.1:{port}: healthy\n")
    await server.stop()
    status, said = await probe(port)
    assert status == 1 and "UNAVAILABLE" in said


async def test_without_port() -> None:
    status, said = await probe(0)
    assert status == 78 and "TANDEM_RPC_PORT" in said
