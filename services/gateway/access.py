"""The gateway's outermost layer: API keys and what they allow, request ids, trace context, every request's books."""

from __future__ import annotations

import re
import secrets
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services import tracing
from services.gateway.errors import ApiError, unauthorized
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics, RequestRecord
from services.gateway.rates import Rates

log = structlog.get_logger()

OPEN_PATHS = ("/live", "/health")
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
TENANT, RECORD = "tandem.tenant", "tandem.record"  # keys of the ASGI scope

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Access:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, rates: Rates, metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
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
        record: RequestRecord | None = None
        if scope["method"] == "POST" and scope["path"] in GENERATION_PATHS:
            record = scope[RECORD] = RequestRecord(self._metrics)
            span = tracing.start("gateway", headers.get(b"traceparent", "").strip().lower(), request_id=request_id)
            tracing.traceparent.set(span.context)
            structlog.contextvars.bind_contextvars(request_id=request_id, trace_id=tracing.trace_id(span.context))
        status: int | None = None

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and (refusal := self._refusal(scope, headers, record)):
                why, error = refusal
                self._metrics.refused.labels(why).inc()
                challenge = {"www-authenticate": "Bearer"} if error.status == 401 else {}
                await error.response(challenge)(scope, receive, send_on)
                return
            await self._app(scope, receive, send_on)
        finally:
            if record is not None:
                outcome = record.close(status)
                fault = outcome if outcome == "server_error" else ""
                span.end(error=fault, path=scope["path"], status=status or 0, outcome=outcome)
                seconds = round(time.monotonic() - record.arrival, 6)
                tell = log.warning if fault else log.debug
                tell("request", path=scope["path"], status=status, outcome=outcome, seconds=seconds)

    def _refusal(
        self, scope: Scope, headers: dict[bytes, str], record: RequestRecord | None
    ) -> tuple[str, ApiError] | None:
        """Why a request is not let in. One that is has its tenant in the scope, and pays for its tokens."""
        tenant = self._keys.tenant(headers.get(b"authorization", ""))
        if tenant is None:
            return "key", unauthorized()
        if record is not None:
            if refusal := self._rates.admit(tenant, time.monotonic()):
                return refusal
            record.charge = lambda tokens: self._rates.charge(tenant, tokens, time.monotonic())
        scope[TENANT] = tenant
        return None
