"""The routes of the gateway, and their OpenAPI document."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.config import GatewayConfig
from services.gateway.access import RECORD, TENANT
from services.gateway.body import read_body
from services.gateway.errors import ApiError, ErrorBody, internal
from services.gateway.intake import Intake, Started
from services.gateway.models import Models
from services.gateway.openai_types import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    ModelEntry,
    ModelList,
)
from services.gateway.pins import PIN_HEADER, Pins, seconds_to_pin
from services.gateway.placement import Placements
from services.gateway.response import GenerationResponse

_SESSION = "x-session-id"  # header: what the policy `session` keeps on one worker
_DOCUMENTED = (CompletionRequest, ChatRequest, Completion, ChatCompletion, ModelList, ErrorBody)
_DESCRIPTION = """The OpenAI API of a Tandem cluster.

Fields that are not listed are ignored. Features that are known and not offered (tools, response formats other than
text, audio, suffix, best_of other than n) answer 400 and name the field."""


def build_app(config: GatewayConfig, models: Models, intake: Intake, placements: Placements, pins: Pins) -> FastAPI:
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
        card = placements.card(models.of(name).name)
        return ModelEntry(name, started, card.max_model_len if card else None)

    async def answer(request: Request, generation_of: Callable[..., Awaitable[Started]]) -> Response:
        session = request.headers.get(_SESSION, "")
        seconds = seconds_to_pin(request.headers.get(PIN_HEADER), session)
        body = await read_body(request, config.max_body_bytes, config.body_timeout)
        generation, release = await generation_of(body, request.scope[TENANT], session)
        pinned = pins.begin(generation.plan, seconds) if seconds is not None else None
        return GenerationResponse(generation, request.scope[RECORD], release, pinned)

    @app.post("/v1/completions", openapi_extra=_body(CompletionRequest), responses=_answers(Completion))
    async def completions(request: Request) -> Response:
        """Completes prompts: a text, token ids, or a list of either."""
        return await answer(request, intake.completion)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatRequest), responses=_answers(ChatCompletion))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await answer(request, intake.chat)

    @app.get("/v1/models", responses=_answers(ModelList))
    async def list_models() -> Response:
        """The models that this cluster serves, under each of their names."""
        return _json(ModelList([entry(name) for name in models.names]))

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One model."""
        return _json(entry(model))

    @app.get("/health")
    async def health() -> Response:
        """200 when a request could run now: a router and a worker that decodes are known, of any model."""
        if any(map(placements.is_ready, models)):
            return _json({"status": "ready"})
        status = "asleep" if any(map(placements.is_asleep, models)) else "waiting for workers"
        return _json({"status": status}, 503, {"retry-after": "1"})

    @app.get("/live")
    async def live() -> Response:
        """200 while the process runs."""
        return _json({"status": "live"})

    @app.get("/version")
    async def version_() -> Response:
        """Tandem's version."""
        return _json({"version": version})

    return app


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

    errors = {
        400: "bad value",
        401: "no API key",
        404: "unknown model",
        408: "slow body",
        413: "too long",
        415: "packed body",
    }
    errors |= {429: "too much at once", 500: "fault of the server", 503: "no worker now", 504: "took too long"}
    return {200: answer("done", kind), **{status: answer(text, ErrorBody) for status, text in errors.items()}}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


_SCHEMAS = msgspec.json.schema_components(_DOCUMENTED, ref_template="#/components/schemas/{name}")[1]
