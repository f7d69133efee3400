"""HTTP/1.1 on the wire: uvicorn's httptools protocol with a bound on what a client may send as headers."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.errors import ApiError

_MAX_HEADER_BYTES = 64 << 10


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 and closes when the headers of a request go beyond 64 KiB, however they are cut."""

    _reading_headers = True
    _header_bytes = 0
    _completed = False  # a request ended in the present piece

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        self._completed = False
        super().data_received(data)
        if self._completed or not self._reading_headers:
            return
        self._header_bytes += len(data)
        if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
            body = ApiError(431, f"The headers are longer than {_MAX_HEADER_BYTES} bytes").body()
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """The body begins."""
        self._reading_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next request may begin."""
        self._reading_headers, self._header_bytes, self._completed = True, 0, True
        super().on_message_complete()
