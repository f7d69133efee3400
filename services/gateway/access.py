"""The gateway's outermost layer: API keys, request ids, trace context, and the books of every generation request."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.errors import unauthorized
from services.gateway.metrics import GatewayMetrics, RequestRecord
from services.rpc_server import traceparent

OPEN_PATHS = ("/live", "/health")
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
TENANT, RECORD = "tandem.tenant", "tandem.record"  # keys of the ASGI scope

_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiKeys:
    """The keys that open the API. None configured: everybody is let in, as the tenant without a name."""

    def __init__(self, keys: str) -> None:
        """`keys`: separated by commas."""
        self._digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys.split(",") if key.strip()]

    def tenant(self, authorization: str) -> str | None:
        """The tenant of an Authorization header; None if it opens nothing."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return hashlib.sha256(b"tandem-tenant\0" + digest).hexdigest()[:32]


class Access:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        request_id = headers.get(b"x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        traceparent.set(_child_of(headers.get(b"traceparent", "")))
        record: RequestRecord | None = None
        if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
            record = scope[RECORD] = RequestRecord(self._metrics)
        status: int | None = None

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            tenant = self._keys.tenant(headers.get(b"authorization", ""))
            if tenant is None and scope["path"] not in OPEN_PATHS:
                await unauthorized().response({"www-authenticate": "Bearer"})(scope, receive, send_on)
                return
            scope[TENANT] = tenant or ""
            await self._app(scope, receive, send_on)
        finally:
            if record is not None:
                record.close(status)


def _child_of(parent: str) -> str:
    """A W3C trace parent for the calls of this request: in the caller's trace, or in a new one."""
    match = _TRACEPARENT.fullmatch(parent.strip().lower())
    trace_id, flags = match.groups() if match else (secrets.token_hex(16), "01")
    return f"00-{trace_id}-{secrets.token_hex(8)}-{flags}"
