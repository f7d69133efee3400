"""Traces: one for each request, with a span for each of its stages, made in the process that knows its times.

What is carried from hop to hop is the W3C trace context (`traceparent`), whether spans are made or not. They are where
the standard variable OTEL_EXPORTER_OTLP_ENDPOINT names a collector and the extra `otel` is installed, and go there by
OTLP over HTTP in the background. There is never one for a token.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

log = structlog.get_logger()

# W3C trace context of the request being served; channels hand it to the next hop.
traceparent: ContextVar[str] = ContextVar("traceparent", default="")

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_CLOCK_JITTER = 1_000_000  # ns: what two readings of the clocks may lie apart, or the system's clock be slewed
_FLUSH_SECONDS = 2.0  # that the end of a process waits for its last spans

_provider: TracerProvider | None = None
_monotonic_began = 0  # Unix ns


class Span:
    """A stage under way; `context` is what those in it have for parent."""

    def __init__(self, context: str, span: OtelSpan | None) -> None:
        self.context = context
        self._span = span

    def end(self, at: float | None = None, *, error: str = "", **attributes: str | int | float) -> None:
        """It is over, now or at `at` (monotonic seconds). `error`: why it failed."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(_named(attributes))
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_unix_nanoseconds(at))
        self._span = None


def configure(role: str, name: str) -> None:
    """Has this process export spans if the environment names a collector."""
    global _provider
    if not any(map(os.environ.get, _ENDPOINTS)):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("no traces: a collector is named, but packages are missing: pip install 'tandem-serve[otel]'")
        return
    resource = Resource.create({"service.name": f"tandem-{role}", "service.instance.id": name or role})
    _provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def shutdown() -> None:
    """Sends what is left, for two seconds at most: a collector that is gone must not hold the process."""
    if _provider is not None:
        last = threading.Thread(target=_provider.shutdown, daemon=True)  # on its own it would wait for half a minute
        last.start()
        last.join(_FLUSH_SECONDS)


def start(name: str, parent: str, *, at: float | None = None, **attributes: str | int | float) -> Span:
    """A span that begins now or at `at` (monotonic seconds), in the context `parent`; "" begins a trace.

    Attributes get the prefix `tandem.`. Where no spans are made, what is in it has the context `parent`, or a new one.
    """
    if _provider is None:
        return Span(parent if _TRACEPARENT.fullmatch(parent) else _new_context(), None)
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    context = None
    if match := _TRACEPARENT.fullmatch(parent):
        trace_id, span_id, flags = (int(number, 16) for number in match.groups())
        context = set_span_in_context(NonRecordingSpan(SpanContext(trace_id, span_id, True, TraceFlags(flags))))
    span = _provider.get_tracer("tandem").start_span(
        name, context, attributes=_named(attributes), start_time=_unix_nanoseconds(at)
    )
    own = span.get_span_context()
    return Span(f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}", span)


def record(
    name: str, parent: str, begin: float, end: float, *, error: str = "", **attributes: str | int | float
) -> None:
    """A span from `begin` to `end` (monotonic seconds); of a request without context there is none."""
    if _provider is not None and parent:
        start(name, parent, at=begin, **attributes).end(end, error=error)


def trace_id(context: str) -> str:
    """The trace of a context; "" if it has none."""
    match = _TRACEPARENT.fullmatch(context)
    return match.group(1) if match else ""


def _new_context() -> str:
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def _named(attributes: dict[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"tandem.{name}": value for name, value in attributes.items()}


def _unix_nanoseconds(at: float | None) -> int:
    """Spans that share an instant get the same number for it, unless the clock was set meanwhile."""
    global _monotonic_began
    began = time.time_ns() - time.monotonic_ns()
    if abs(began - _monotonic_began) > _CLOCK_JITTER:
        _monotonic_began = began
    return _monotonic_began + (time.monotonic_ns() if at is None else round(at * 1e9))
