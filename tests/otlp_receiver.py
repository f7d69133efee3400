"""A collector for tests: takes OTLP over HTTP and keeps the spans."""

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class Span(NamedTuple):
    """As it came."""

    service: str
    name: str
    trace: str  # hex
    id: str
    parent: str  # "": none
    begin: int  # Unix nanoseconds
    end: int
    failed: bool
    attributes: dict[str, str | int | float]


class OtlpReceiver:
    """Listens on a free port until `close`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces", self.path
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait(self, trace: str, enough: Callable[[list[Span]], bool], timeout: float = 20.0) -> list[Span]:
        """The spans of a trace, as soon as they are enough, in the order in which they began."""
        deadline = time.monotonic() + timeout
        while True:
            spans = sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.begin)
            if enough(spans):
                return spans
            if time.monotonic() > deadline:
                pytest.fail(f"after {timeout} s there are only {spans}")
            time.sleep(0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = str(_values(resource.resource.attributes)["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        Span(
                            service,
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            span.status.code == span.status.STATUS_CODE_ERROR,
                            _values(span.attributes),
                        )
                    )


def _values(attributes: "list[KeyValue]") -> dict[str, str | int | float]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}
