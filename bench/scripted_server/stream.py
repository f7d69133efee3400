"""One streamed answer, sent as the script has it."""

import asyncio
import itertools
import json
import socket
import struct
import time
from pathlib import Path

import msgspec

from bench.scripted_server.api import STREAM_HEAD, Ask, error, error_body, usage
from bench.scripted_server.script import Fault, Script, Sent


class Log:
    """Counts streamed requests and writes a line for each as its answer ends."""

    def __init__(self, script: Script, path: Path | None) -> None:
        self.script = script
        self._numbers = itertools.count()
        self._file = path.open("wb", buffering=0) if path else None

    def next(self, path: str, ask: Ask) -> Sent:
        """The line of a request that has just arrived."""
        return Sent(number=next(self._numbers), path=path, received=time.monotonic(), prompt_tokens=ask.prompt_tokens)

    def write(self, sent: Sent) -> None:
        """Its answer has ended."""
        if self._file:
            self._file.write(msgspec.json.encode(sent) + b"\n")


class Stream:
    """One streamed answer."""

    def __init__(self, transport: asyncio.Transport, log: Log, sent: Sent, ask: Ask) -> None:
        self._transport = transport
        self._log = log
        self._sent = sent
        self._ask = ask
        self._answer = log.script.answers[sent.number % len(log.script.answers)]
        self._chat = ask.messages is not None
        name, kind = ("chatcmpl", "chat.completion.chunk") if self._chat else ("cmpl", "text_completion")
        head = {"id": f"{name}-{sent.number}", "object": kind, "created": int(time.time()), "model": ask.model}
        self._head = json.dumps(head)[:-1]

    async def run(self) -> None:
        """Sends it and logs it."""
        try:
            await self._send()
        except asyncio.CancelledError:
            self._sent.left = True
        finally:
            self._log.write(self._sent)

    async def _send(self) -> None:
        answer = self._answer
        fault = answer.fault
        wanted = self._ask.wanted if answer.tokens == "asked" else answer.tokens
        if fault and fault.kind in ("http", "close"):
            await self._wait(answer.ttft)
            self._sent.fault = fault.kind
            self._sent.end = time.monotonic()
            if fault.kind == "http":
                self._transport.write(error(fault.status, "as the script has it", fault.headers))
            else:
                self._transport.close()
            return
        await self._write(STREAM_HEAD)
        if self._chat:
            await self._event(self._choice('"delta": {"role": "assistant", "content": ""}', "null"))
        due = answer.ttft
        gaps = itertools.cycle(answer.gaps)
        for number, first in enumerate(range(0, wanted, answer.tokens_per_message)):
            await self._wait(due)
            due += next(gaps)
            if fault and fault.at == number and await self._fails(fault):
                return
            last = min(first + answer.tokens_per_message, wanted)
            text = "".join(f" {token}" for token in range(first, last))
            await self._event(self._choice(self._text(text), '"length"' if last == wanted else "null"), last - first)
        if not wanted:
            await self._wait(due)
            await self._event(self._choice(self._text(""), '"stop"'))
        if answer.usage and self._ask.stream_options and self._ask.stream_options.include_usage:
            counts = json.dumps(usage(self._sent.prompt_tokens, wanted, answer.cached_tokens))
            await self._event(f'{self._head}, "choices": [], "usage": {counts}}}')
        if fault and fault.kind == "no_done":
            self._sent.fault = fault.kind
        else:
            await self._event("[DONE]")
        await self._finish()

    async def _fails(self, fault: Fault) -> bool:
        """Makes a mistake in place of a message. Returns whether that ends the answer."""
        if fault.kind == "no_done":
            return False
        self._sent.fault = fault.kind
        match fault.kind:
            case "reset":
                connection: socket.socket = self._transport.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self._sent.end = time.monotonic()
                self._transport.abort()
            case "stall":
                await asyncio.get_running_loop().create_future()
            case "malformed":
                await self._event('{"choices": [{"index"')
                return False
            case "error_event":
                await self._event(error_body("as the script has it", 500))
                await self._finish()
            case _:
                await self._finish()
        return True

    async def _finish(self) -> None:
        self._sent.end = time.monotonic()
        await self._write(b"0\r\n\r\n")

    async def _wait(self, due: float) -> None:
        """Until so many seconds after the arrival of the request."""
        await asyncio.sleep(max(0.0, self._sent.received + due - time.monotonic()))

    def _text(self, text: str) -> str:
        return f'"delta": {{"content": "{text}"}}' if self._chat else f'"text": "{text}", "logprobs": null'

    def _choice(self, body: str, finish_reason: str) -> str:
        return f'{self._head}, "choices": [{{"index": 0, {body}, "finish_reason": {finish_reason}}}]}}'

    async def _event(self, data: str, tokens: int = 0) -> None:
        """Sends one event as one chunk of the body."""
        end = "\r\n" if self._answer.crlf else "\n"
        comment = f": ping{end}{end}" if self._answer.comments else ""
        event = f"{comment}data: {data}{end}{end}".encode()
        now = await self._write(b"%x\r\n%b\r\n" % (len(event), event))
        if tokens:
            self._sent.times.append(now)
            self._sent.tokens += tokens

    async def _write(self, data: bytes) -> float:
        """Returns when the last byte was written."""
        if self._answer.split:
            for place in range(len(data) - 1):
                self._transport.write(data[place : place + 1])
                await asyncio.sleep(0)  # the loop joins what is written in one of its rounds
            data = data[-1:]
        now = time.monotonic()
        self._transport.write(data)
        return now
