"""gRPC servers and channels of the cluster: cluster key, TLS, keepalive, health, trace context."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from services.rpc import cluster_pb2, cluster_pb2_grpc
from services.security import METADATA_KEY, ClusterKey
from services.tracing import trace_id, traceparent

T = TypeVar("T")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A peer that stops answering is noticed within about 4 s, also between calls.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # the pings above are wanted
    # A restarted peer on the same port is found again quickly.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.so_reuseport", 0),
]


class _Authenticator(grpc.aio.ServerInterceptor):
    """Refuses calls without a fresh proof of the cluster key. Health checks stay open."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = str(handler_call_details.method)
        if not method.startswith("/grpc.health.v1.Health/"):
            metadata = dict(handler_call_details.invocation_metadata or ())
            if not self._key.check(method, str(metadata.get(METADATA_KEY, ""))):
                handler = await continuation(handler_call_details)
                return _refusal(handler) if handler else None
        return await continuation(handler_call_details)


class _TraceContext(grpc.aio.ServerInterceptor):
    """Takes in the trace context of a call, for its handler, its log lines and the next hop."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == "traceparent":
                traceparent.set(str(value))
                structlog.contextvars.bind_contextvars(trace_id=trace_id(str(value)))
        return await continuation(handler_call_details)


def _refusal(handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not carry a fresh proof of the cluster key")

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[(bool(handler.request_streaming), bool(handler.response_streaming))]
    return cast("grpc.RpcMethodHandler[Any, Any]", cast(Any, make)(refuse))


def _signed(details: Any, key: ClusterKey | None) -> Any:
    """Call details with the proof of the cluster key added."""
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    method = details.method.decode() if isinstance(details.method, bytes) else details.method
    if key:
        metadata.add(METADATA_KEY, key.sign(method))
    return details._replace(metadata=metadata)


# grpc.aio files an interceptor under the first kind of call it matches, so each kind needs a class of its own.
class _UnarySigner(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details = _signed(client_call_details, self._key)
        if parent := traceparent.get():  # a stream serves many requests: what it carries says whose each message is
            details.metadata.add("traceparent", parent)
        return await continuation(details, request)


class _StreamSigner(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_signed(client_call_details, self._key), request_iterator)


class NodeService(cluster_pb2_grpc.NodeServicer):
    """What every process answers: its metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def Metrics(
        self, request: cluster_pb2.MetricsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.MetricsReply:
        """The process's Prometheus registry as text."""
        return cluster_pb2.MetricsReply(text=generate_latest(self._registry))


class RpcServer:
    """A gRPC server with Node and health services; `address` is known at once, calls are served after `start`."""

    def __init__(self, host: str, port: int, key: ClusterKey | None, registry: CollectorRegistry) -> None:
        interceptors: list[grpc.aio.ServerInterceptor] = [_TraceContext()]
        if key:
            interceptors.insert(0, _Authenticator(key))
        self.server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        cluster_pb2_grpc.add_NodeServicer_to_server(NodeService(registry), self.server)
        address = f"{host}:{port}"
        try:
            if key and key.certificates:
                bound = self.server.add_secure_port(address, key.certificates.server_credentials())
            else:
                bound = self.server.add_insecure_port(address)
        except RuntimeError as error:
            why = "the port is taken; choose another with --rpc-port, or leave it out" if port else error
            raise OSError(f"cannot listen on {address}: {why}") from error
        self.address = f"{host}:{bound}"

    async def start(self) -> None:
        """Begins to serve; not healthy until `set_healthy(True)`."""
        await self.server.start()
        await self.set_healthy(False)

    async def set_healthy(self, healthy: bool) -> None:
        """Sets what grpc.health.v1 answers for the whole server."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if healthy else status.NOT_SERVING)

    async def stop(self, grace: float = 0.5) -> None:
        """Ends all calls within `grace` seconds."""
        await self.server.stop(grace)


class ChannelClosed(Exception):
    """The channel was closed under a call, as its peer has left the cluster."""


async def answer_of(call: Awaitable[T]) -> T:
    """The answer of a unary call. Raises ChannelClosed where gRPC cancels whoever waits, and AioRpcError.

    A task that is cancelled by nobody must not end as if it were: what it was to do would be left undone.
    """
    try:
        return await call
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ChannelClosed("the peer has left") from None


def make_channel(address: str, key: ClusterKey | None) -> grpc.aio.Channel:
    """A channel to a peer of the cluster."""
    signers = [_UnarySigner(key), _StreamSigner(key)]
    if key is None or key.certificates is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=signers)
    options = _OPTIONS + key.certificates.channel_options
    return grpc.aio.secure_channel(address, key.certificates.channel_credentials(), options, interceptors=signers)
