"""The routes of the gateway, and their OpenAPI document."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.cluster_state import ClusterState
from services.config import GatewayConfig
from services.gateway.access import RECORD, TENANT
from services.gateway.cluster_metrics import cluster_metrics
from services.gateway.errors import ApiError, ErrorBody, internal, model_not_found
from services.gateway.intake import Intake
from services.gateway.openai_types import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelEntry,
    ModelList,
)
from services.gateway.placement import Placements
from services.gateway.response import GenerationResponse

_SESSION = "x-session-id"  # header: what the policy `session` keeps on one worker
_DOCUMENTED = (CompletionRequest, ChatRequest, Completion, ChatCompletion, ModelList, ErrorBody)
_DESCRIPTION = """The OpenAI API of a Tandem cluster.

Fields that are not listed are ignored. Features that are known and not offered (tools, response formats other than
text, audio, suffix, best_of other than n) answer 400 and name the field."""


def build_app(config: GatewayConfig, intake: Intake, state: ClusterState, placements: Placements) -> FastAPI:
    """The application, without the access layer around it."""
    version = importlib.metadata.version("tandem-serve")
    started = int(time.time())
    app = FastAPI(title="Tandem", version=version, description=_DESCRIPTION, redoc_url=None)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _server_error)
    document = app.openapi

    def openapi() -> dict[str, Any]:
        schema = document()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(_SCHEMAS)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]

    def entry(name: str) -> ModelEntry:
        card = placements.model
        return ModelEntry(name, started, card.max_model_len if card else None)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest), responses=_answers(Completion))
    async def completions(request: Request) -> Response:
        """Completes prompts: a text, token ids, or a list of either."""
        body = await _read(request, config.max_body_bytes)
        generation, release = await intake.completion(body, request.scope[TENANT], request.headers.get(_SESSION, ""))
        return GenerationResponse(generation, request.scope[RECORD], release)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest), responses=_answers(ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await _read(request, config.max_body_bytes)
        generation, release = await intake.chat(body, request.scope[TENANT], request.headers.get(_SESSION, ""))
        return GenerationResponse(generation, request.scope[RECORD], release)

    @app.get("/v1/models", responses=_answers(ModelList))
    async def models() -> Response:
        """The model that this cluster serves, under each of its names."""
        return _json(ModelList([entry(name) for name in intake.model_names]))

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        if model not in intake.model_names:
            raise model_not_found(model)
        return _json(entry(model))

    @app.get("/health")
    async def health() -> Response:
        """200 when a request could run now: a router and a worker that decodes are known."""
        if placements.ready:
            return _json({"status": "ready"})
        status = "asleep" if placements.asleep else "waiting for workers"
        return _json({"status": status}, 503, {"retry-after": "1"})

    @app.get("/live")
    async def live() -> Response:
        """200 while the process runs."""
        return _json({"status": "live"})

    @app.get("/version")
    async def version_() -> Response:
        """Tandem's version."""
        return _json({"version": version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics of all members of the cluster, with the labels worker and role."""
        return Response(await cluster_metrics(state, placements), headers={"content-type": CONTENT_TYPE_LATEST})

    return app


async def _read(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is longer than `limit` bytes, and 415 for a packed one."""
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        message = f"The body is encoded as {encoding[:20]!r}; send it plain, without `Content-Encoding`"
        raise ApiError(415, message, code="unsupported_encoding")
    body = bytearray()
    length = request.headers.get("content-length", "")
    too_long = length.isdecimal() and int(length) > limit
    if not too_long:
        async for piece in request.stream():
            body += piece
            if too_long := len(body) > limit:
                break
    if too_long:
        raise ApiError(413, f"The body is longer than {limit} bytes", code="body_too_large")
    return bytes(body)


async def _api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: "There is no such path; see /docs", 405: "This path does not take this method; see /docs"}
    message = what.get(error.status_code, error.detail)
    return ApiError(error.status_code, message, code="unknown_route").response(error.headers)


async def _server_error(_request: Request, _error: Exception) -> Response:
    return internal().response()


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _reference(kind)}}}}


def _answers(kind: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    def answer(description: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {"description": description, "content": {"application/json": {"schema": _reference(kind)}}}

    errors = {400: "bad value", 401: "no API key", 404: "unknown model", 413: "too long", 415: "packed body"}
    errors |= {429: "too much at once", 500: "fault of the server", 503: "no worker now", 504: "took too long"}
    return {200: answer("done", kind), **{status: answer(text, ErrorBody) for status, text in errors.items()}}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_SCHEMAS = msgspec.json.schema_components(_DOCUMENTED, ref_template="#/components/schemas/{name}")[1]
