"""Asks the admin port of a gateway."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

import msgspec

from services.config import ConfigError
from services.live import Live

_SECONDS = 10.0  # workers that are asked on the way have 5


class AdminFailed(ConfigError):
    """The admin port does not answer as it should."""


class AdminClient:
    """Asks the admin port at `url`; `key` opens it."""

    def __init__(self, url: str, key: str) -> None:
        """Raises ConfigError for what is no address."""
        self._url = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ConfigError(f"--admin {url!r} is no address; write e.g. http://127.0.0.1:8090")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, method: str, path: str, body: bytes | None = None, timeout: float = _SECONDS) -> bytes:
        """The body of the answer. Raises AdminFailed."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=timeout)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise AdminFailed(f"{self._url.geturl()} does not answer ({error}); try --admin") from error
        finally:
            connection.close()
        if response.status in (401, 403):
            raise AdminFailed("the admin port wants a key: set TANDEM_ADMIN_KEY")
        if response.status != 200:
            raise AdminFailed(f"{self._url.geturl()} answers {response.status}: {_reason(answer)}")
        return answer

    def text(self) -> bytes:
        """The state as JSON. Raises AdminFailed."""
        return self.ask("GET", "/api/live")

    def live(self) -> Live:
        """The state. Raises AdminFailed."""
        try:
            return msgspec.json.decode(self.text(), type=Live)
        except msgspec.MsgspecError as error:
            raise AdminFailed(f"{self._url.geturl()} tells no state of a cluster: {error}") from error


def _reason(answer: bytes) -> str:
    """What an error says, in the API's shape. Another server, or the API's port, knows no such path."""
    try:
        error = json.loads(answer)["error"]
        if error["code"] != "unknown_route":
            return str(error["message"])
    except (ValueError, KeyError, TypeError):
        pass
    return "is it an admin port?"
