"""Errors of the API: one exception, in the shape that OpenAI clients expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from starlette.responses import Response

_TOLD = 20  # models of which an error names at most so many


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
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.detail = ErrorDetail(message, kind, param, code)
        self.retry_after = retry_after
        self.closes = closes  # the connection: what the client still sends is of no use

    def body(self) -> bytes:
        """JSON of the error."""
        return msgspec.json.encode(ErrorBody(self.detail))

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """The error as an HTTP response."""
        retry = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        close = {"connection": "close"} if self.closes else {}
        return Response(self.body(), self.status, {**(headers or {}), **retry, **close}, "application/json")


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


def model_not_found(model: str, names: Sequence[str]) -> ApiError:
    """404: the gateway serves other models, by these names."""
    shown = model if len(model) <= 100 else model[:100] + "…"
    there_are = ", ".join(names[:_TOLD]) + (", …" if len(names) > _TOLD else "")
    return ApiError(
        404,
        f"The model `{shown}` does not exist; there are: {there_are} (GET /v1/models)",
        param="model",
        code="model_not_found",
    )


def unauthorized(message: str = "Missing or wrong API key; send `Authorization: Bearer <key>`") -> ApiError:
    """401: no key, or a wrong one."""
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def forbidden(message: str, param: str | None = None) -> ApiError:
    """403: who asks is known and may not."""
    return ApiError(403, message, kind="permission_error", param=param, code="forbidden")


def overloaded(message: str, retry_after: int = 1) -> ApiError:
    """429: too much at once."""
    return ApiError(429, message, kind="rate_limit_error", code="overloaded", retry_after=retry_after)


def load_shed(retry_after: int) -> ApiError:
    """429: the planner has routers refuse a part of the requests, this one among them."""
    return ApiError(
        429,
        "More requests come than all workers can serve in time; a part of them, the least urgent first, is refused",
        kind="rate_limit_error",
        code="load_shed",
        retry_after=retry_after,
    )


def rate_limited(message: str, retry_after: int) -> ApiError:
    """429: more than the API key allows."""
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """503: nobody can do it now."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=retry_after)


def internal(message: str = "The request failed inside the server") -> ApiError:
    """500: a fault of the server; the message tells nothing of its inside."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def timed_out() -> ApiError:
    """504: the request's time is over."""
    return ApiError(504, "The request took longer than the server allows", kind="server_error", code="timeout")
