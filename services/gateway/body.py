"""Reads the body of a request, within bounds of length and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from services.gateway.errors import ApiError


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body.

    Raises ApiError 413 as soon as it is longer than `limit` bytes, 415 for a packed one, and 408 if it is not there
    after `seconds`: whoever sends byte by byte would hold a connection, and what is read, for ever.
    """
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        message = f"The body is encoded as {encoding[:20]!r}; send it plain, without `Content-Encoding`"
        raise ApiError(415, message, code="unsupported_encoding")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_long(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_long(limit)
    except TimeoutError:
        message = f"The body was not there within {seconds:g} s: {len(body)} bytes came"
        raise ApiError(408, message, code="body_too_slow", closes=True) from None
    return bytes(body)


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"The body is longer than {limit} bytes", code="body_too_large")
