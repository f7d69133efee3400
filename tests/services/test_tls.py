"""Mutual TLS between members: what certificates are taken, and that they are taken anew."""

import datetime
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from services.certificates import issue
from services.config import ClusterConfig, ConfigError, load
from services.rpc import cluster_pb2, cluster_pb2_grpc
from services.rpc_server import RpcServer, make_channel
from services.security import ClusterKey, key_of
from services.tls import TlsError, certificates_of

KEY = "a key that all processes share"
_DAY = datetime.timedelta(days=1)
_FILES = {"tls_certificate": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}


def config_of(folder: Path, **flags: str) -> ClusterConfig:
    files = {name: str(folder / file) for name, file in _FILES.items()}
    return load(ClusterConfig, files | {"cluster_key": KEY} | flags)


def key_from(folder: Path, **flags: str) -> ClusterKey:
    key = key_of(config_of(folder, **flags))
    assert key is not None
    return key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue(tmp_path / "own", "tandem", _DAY, _DAY)
    return tmp_path / "own"


def expire(folder: Path) -> None:
    issue(folder, "tandem", -_DAY, _DAY)


def expire_authority(folder: Path) -> None:
    (folder / "ca.crt").unlink()
    (folder / "ca.key").unlink()
    issue(folder, "tandem", _DAY, -_DAY)


def exchange_key(folder: Path) -> None:
    shutil.copy(folder / "ca.key", folder / "tls.key")


def exchange_authority(folder: Path) -> None:
    issue(folder / "other", "tandem", _DAY, _DAY)
    shutil.copy(folder / "other" / "ca.crt", folder)


def rename(folder: Path) -> None:
    issue(folder, "another-cluster", _DAY, _DAY)


def spoil(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text("-----BEGIN CERTIFICATE-----\nnone\n")

    return write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tls.crt").unlink(), r"tls\.crt cannot be read \(No such file"),
        (lambda folder: (folder / "tls.key").unlink(), r"tls\.key cannot be read"),
        (lambda folder: (folder / "ca.crt").write_bytes(b"x" * (2 << 20)), r"ca\.crt is longer than"),
        (spoil("tls.crt"), r"tls\.crt: no certificates in PEM"),
        (spoil("tls.key"), r"tls\.key: no private key in PEM"),
        (spoil("ca.crt"), r"ca\.crt: no certificates in PEM"),
        (expire, r"tls\.crt expired on \d{4}-"),
        (expire_authority, r"ca\.crt expired on"),
        (exchange_key, r"tls\.key is not the key of .*tls\.crt"),
        (exchange_authority, r"tls\.crt is not issued by a CA of .*ca\.crt"),
        (rename, r"'tandem' is not among its DNS names \(it has another-cluster\)"),
    ],
)
def test_what_peers_would_refuse_is_told_at_the_start(
    folder: Path, change: Callable[[Path], object], message: str
) -> None:
    change(folder)
    with pytest.raises(TlsError, match=message):
        key_of(config_of(folder))


def test_files_come_together_and_beside_a_key(folder: Path) -> None:
    with pytest.raises(TlsError, match="tls_key is not set"):
        certificates_of(config_of(folder, tls_key=""))
    with pytest.raises(ConfigError, match="set TANDEM_CLUSTER_KEY"):
        key_of(config_of(folder, cluster_key=""))


async def serving(key: ClusterKey) -> RpcServer:
    server = RpcServer("127.0.0.1", 0, key, CollectorRegistry())
    await server.start()
    await server.set_healthy(True)
    return server


async def ask(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """How a call ends that needs the cluster key."""
    async with channel:
        try:
            await cluster_pb2_grpc.NodeStub(channel).Metrics(cluster_pb2.MetricsRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_a_member_is_let_in_and_nobody_else(folder: Path) -> None:
    server = await serving(key_from(folder))
    try:
        assert await ask(make_channel(server.address, key_from(folder))) == grpc.StatusCode.OK
        # The cluster key is asked for as before.
        other = ClusterKey("the key of another cluster", certificates_of(config_of(folder)))
        assert await ask(make_channel(server.address, other)) == grpc.StatusCode.UNAUTHENTICATED
        # Neither without TLS, nor without a certificate, nor with one of another CA; health is no exception.
        assert await ask(make_channel(server.address, ClusterKey(KEY))) == grpc.StatusCode.UNAVAILABLE
        issue(folder / "other", "tandem", _DAY, _DAY)
        stranger = {name: (folder / "other" / file).read_bytes() for name, file in _FILES.items()}
        ca, options = (folder / "ca.crt").read_bytes(), [("grpc.ssl_target_name_override", "tandem")]
        for credentials in (
            grpc.ssl_channel_credentials(ca),
            grpc.ssl_channel_credentials(ca, stranger["tls_key"], stranger["tls_certificate"]),
        ):
            async with grpc.aio.secure_channel(server.address, credentials, options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        # A member calls nobody who has no certificate of its cluster.
        impostor = await serving(key_from(folder / "other"))
        assert await ask(make_channel(impostor.address, key_from(folder))) == grpc.StatusCode.UNAVAILABLE
        await impostor.stop()
    finally:
        await server.stop()


async def test_changed_files_are_taken_and_wrong_ones_are_not(folder: Path) -> None:
    """A server that was started with one CA answers members of the next one, by new files alone."""
    key = key_from(folder)
    server = await serving(key)
    try:
        (folder / "tls.crt").write_text("half a file")
        assert await ask(make_channel(server.address, key)) == grpc.StatusCode.OK
        for name in ("ca.crt", "ca.key"):
            (folder / name).unlink()
        issue(folder, "tandem", _DAY, _DAY)
        fresh = key_from(folder)
        deadline = time.monotonic() + 10
        while await ask(make_channel(server.address, fresh)) != grpc.StatusCode.OK:
            assert time.monotonic() < deadline
        assert await ask(make_channel(server.address, key)) == grpc.StatusCode.OK  # a client takes them, too
    finally:
        await server.stop()
