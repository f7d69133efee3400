"""`tandem probe`: asks a process of the cluster for its health, as containers are checked."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.config import ClusterConfig, ConfigError
from services.tls import Certificates, certificates_of

_ANSWER_SECONDS = 3.0


def probe(config: ClusterConfig) -> int:
    """0 if the gRPC server at the configured address says that it is healthy, else 1. Raises ConfigError."""
    if not config.rpc_port:
        raise ConfigError("rpc_port is not set: set TANDEM_RPC_PORT to the port that the process was given")
    address = f"{config.bind}:{config.rpc_port}"
    with _channel(address, certificates_of(config)) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS)
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}", file=sys.stderr)
            return 1
    healthy = bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    print(f"{address}: {'healthy' if healthy else 'not healthy'}")
    return int(not healthy)


def _channel(address: str, certificates: Certificates | None) -> grpc.Channel:
    if certificates is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, certificates.channel_credentials(), certificates.channel_options)
