"""`tandem chat`: a conversation in the terminal that shows how fast the answers come."""

import contextlib
import http.client
import json
import sys
import time
import unicodedata
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

_HELP = "commands: /reset forgets the conversation, /quit leaves, /help shows this"


class ChatFailed(Exception):
    """The cluster does not answer as it should."""


class Client:
    """Streams chat completions of one server."""

    def __init__(self, url: str, api_key: str) -> None:
        self._url = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise ChatFailed(f"{url!r} is not the address of a server; write e.g. http://127.0.0.1:8000")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = MappingProxyType({})
    ) -> http.client.HTTPResponse:
        """An answer of status 200. Raises ChatFailed for any other."""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.netloc, timeout=600)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._url.path.rstrip("/") + path, data, {**self._headers, **headers})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ChatFailed(f"{self._url.geturl()} does not answer ({error}); is `tandem up` running?") from error
        if response.status != 200:
            raise ChatFailed(_message(response.read()) or f"HTTP {response.status}")
        return response

    def first_model(self) -> str:
        """Name of the first served model."""
        try:
            return str(json.loads(self.request("GET", "/v1/models").read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ChatFailed(f"{self._url.geturl()} serves no model that could answer") from error

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Chunks of a streamed answer."""
        with self.request("POST", "/v1/chat/completions", body) as response:  # left early, it hangs up: the work stops
            try:
                for raw in response:
                    line = raw.decode().strip()
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise ChatFailed(str(chunk["error"].get("message")))
                        yield chunk
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ChatFailed(f"the answer broke off: {error}") from error
        raise ChatFailed("the answer broke off")


def chat_loop(url: str, model: str, system: str, max_tokens: int, temperature: float, api_key: str) -> None:
    """Reads lines and prints answers until the end of input. Piped input is one question."""
    console = Console(stderr=True, highlight=False)
    client = Client(url, api_key)
    model = model or client.first_model()
    start = [{"role": "system", "content": system}] if system else []
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    if not sys.stdin.isatty():
        if question := sys.stdin.read().strip():
            _answer(client, settings, [*start, {"role": "user", "content": question}], console)
        return
    console.print(f"[bold]{model}[/bold] at {url}; {_HELP}")
    messages = list(start)
    while True:
        try:
            line = console.input("[bold cyan]you>[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/quit":
            return
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            console.print(_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": _answer(client, settings, messages, console)})
            except (ChatFailed, KeyboardInterrupt) as error:
                messages.pop()
                console.print(f"\n[red]{error or 'stopped'}[/red]")


def _answer(client: Client, settings: dict[str, Any], messages: list[dict[str, str]], console: Console) -> str:
    body = settings | {"messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    sent = time.monotonic()
    first = last = None
    text = ""
    usage: dict[str, Any] = {}
    with contextlib.closing(client.stream(body)) as chunks:
        for chunk in chunks:
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if delta := choice["delta"].get("content"):
                    last = time.monotonic()
                    first = first or last
                    text += delta
                    print(_printable(delta), end="", flush=True)
    print(flush=True)
    if first is not None and last is not None:
        tokens = int(usage.get("completion_tokens", 0))
        tpot = f"{1000 * (last - first) / (tokens - 1):.1f} ms" if tokens > 1 else "-"
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        console.print(
            f"[dim]TTFT {1000 * (first - sent):.0f} ms, TPOT {tpot}, {tokens} tokens, "
            f"prompt {usage.get('prompt_tokens', 0)} ({cached} cached)[/dim]"
        )
    return text


def _printable(text: str) -> str:
    """Without control characters, which could move the cursor or rename the window."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
