"""The gateway's admin side: a port of its own for those who run the cluster, closed to those who only use it.

With an admin key every request must carry it, as a bearer token or, for browsers, as the password of basic
authentication. Without one the port is bound to loopback (`services.config` refuses the rest), where web pages that a
browser on the same machine shows are strangers, too: they are told by the headers Host and Origin.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from services.cluster_state import ClusterState
from services.config import is_loopback
from services.gateway.cluster_metrics import cluster_metrics, share_of
from services.gateway.console.routes import Console
from services.gateway.decisions import Decisions
from services.gateway.errors import ApiError, forbidden, unauthorized
from services.gateway.members import Members
from services.gateway.metrics import GatewayMetrics
from services.gateway.placement import Placements
from services.rpc import cluster_pb2


def build_admin(
    gateway: str, state: ClusterState, placements: Placements, console: Console, decisions: Decisions
) -> Starlette:
    """The application of a gateway (its incarnation), without the check of who asks.

    What is added to `routes` is served behind that check.
    """

    async def metrics(_request: Request) -> Response:
        """Prometheus metrics of all members of the cluster, with the labels worker, role and model."""
        return await told(state.members())

    async def share(_request: Request) -> Response:
        """The same of those members that no other gateway tells of here: who asks all gateways gets each once."""
        return await told(share_of(gateway, state.members()))

    async def told(members: list[cluster_pb2.Member]) -> Response:
        return Response(await cluster_metrics(members, placements), headers={"content-type": CONTENT_TYPE_LATEST})

    routes = [
        Route("/metrics", metrics),
        Route("/metrics/share", share),
        *Members(state, placements).routes(),
        *decisions.routes(),
        *console.routes(),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error, ApiError: _api_error})


class AdminAccess:
    """ASGI middleware: lets in who has the key, or, where there is none, who is on this machine."""

    def __init__(self, app: ASGIApp, key: str, metrics: GatewayMetrics) -> None:
        self._app = app
        self._digest = hashlib.sha256(key.encode()).digest() if key else None
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        headers = {name: value.decode("latin-1") for name, value in scope.get("headers", ())}
        refusal = self._refusal(headers)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._metrics.refused.labels("admin").inc()
        challenge = {"www-authenticate": 'Basic realm="Tandem admin"'} if refusal.status == 401 else {}
        await refusal.response(challenge)(scope, receive, send)

    def _refusal(self, headers: dict[bytes, str]) -> ApiError | None:
        host = headers.get(b"host", "")
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2] != host:
            return forbidden("The admin port does not answer pages of other servers")
        if self._digest is None:
            name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
            if host and not is_loopback(name.strip("[]")):
                return forbidden("Without an admin key this port is called by a loopback address, or localhost")
            return None
        if not hmac.compare_digest(hashlib.sha256(_credential(headers).encode()).digest(), self._digest):
            return unauthorized("Missing or wrong admin key; send `Authorization: Bearer <key>`")
        return None


def _credential(headers: dict[bytes, str]) -> str:
    """The key that a request carries; "" if none."""
    scheme, _, value = headers.get(b"authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode("latin-1").partition(":")[2]
        except ValueError:  # no base64, or no ASCII
            return ""
    return ""


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, "The admin port has no such path", code="unknown_route").response(error.headers)
