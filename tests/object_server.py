"""An object store that speaks S3, for tests."""

import http.client
import logging
import socket

from moto.server import ThreadedMotoServer


class Server:
    """Moto's S3, which keeps objects in memory."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    def start(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each object
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("PUT", "/bucket")
        assert connection.getresponse().status == 200
        connection.close()

    def stop(self) -> None:
        self._server.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
