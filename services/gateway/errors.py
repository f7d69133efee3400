"""Errors of the API: one exception, in the shape that OpenAI clients expect."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


class ErrorDetail(msgspec.Struct, frozen=True):
    """What is wrong. `param` names the offending field of the request."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends with an error: HTTP status, body, and seconds after which a retry makes sense."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, kind, param, code)
        self.retry_after = retry_after

    def body(self) -> bytes:
        """JSON of the error."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The error as an HTTP response."""
        retry = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return Response(self.body(), self.status, {**(headers or {}), **retry}, "application/json")


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: a value that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def not_offered(param: str, what: str) -> ApiError:
    """400: a known feature of the API that Tandem does not have."""
    return ApiError(400, f"{what} is not offered by this server; leave `{param}` out", param=param, code="unsupported")


def context_length_exceeded(param: str, num_tokens: int, limit: int) -> ApiError:
    """400: the prompt leaves no room for a token."""
    return ApiError(
        400,
        f"This model's context is {limit} tokens, prompt and answer together; the prompt has {num_tokens}. Shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def model_not_found(model: str) -> ApiError:
    """404: the cluster serves another model."""
    shown = model if len(model) <= 100 else model[:100] + "…"
    return ApiError(
        404,
        f"The model `{shown}` does not exist; GET /v1/models lists what there is",
        param="model",
        code="model_not_found",
    )


def unauthorized() -> ApiError:
    """401: no API key, or a wrong one."""
    return ApiError(
        401,
        "Missing or wrong API key; send `Authorization: Bearer <key>`",
        kind="authentication_error",
        code="invalid_api_key",
    )


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """429: too much at once."""
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", retry_after=retry_after)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """503: nobody can do it now."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry_after)


def internal(message: str = "The request failed inside the server") -> ApiError:
    """500: a fault of the server; the message tells nothing of its inside."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out() -> ApiError:
    """504: the request's time is over."""
    return ApiError(504, "The request took longer than the server allows", kind="server_error", code="timeout")
