"""What must be known of a server before it can be measured: its model, its tokenizer, what its chat template adds."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from bench.config import PATHS, LoadConfig
from bench.errors import BenchError
from bench.load.answer import Answer, Manner
from bench.load.http import Pool, parse_url, request_bytes
from bench.measure.record import Record
from bench.workloads.tokenizer import find_tokenizer
from bench.workloads.words import TokenWords

_PATIENCE = 30.0  # seconds for one short answer
_PROBE = "Hello"


class _Reply:
    """An answer that is no stream."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def on_body(self, data: bytes, now: float) -> None:
        self.body += data

    def on_end(self, now: float) -> None:
        self.over.set_result(None)

    def on_lost(self, error: Exception | None, now: float) -> None:
        self.over.set_exception(ConnectionError(str(error or "the server closed the connection")))


class Model(msgspec.Struct):
    """An entry of /v1/models. `root` is where the server has it from, if it tells."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[Model]


async def ask_json(config: LoadConfig, api_key: str, method: str, path: str, body: Any = None) -> bytes:
    """Body of a successful answer. Raises BenchError."""
    address = parse_url(config.url)
    data = b"" if body is None else msgspec.json.encode(body)
    reply = _Reply()
    pool = Pool(address)
    try:
        async with asyncio.timeout(_PATIENCE):
            connection = await pool.connect()
            connection.send(request_bytes(address, method, path, data, api_key), reply)
            await reply.over
            connection.abort()
    except OSError as error:  # TimeoutError is one
        reason = str(error) or f"no answer within {_PATIENCE:g} s"
        raise BenchError(f"{config.url} does not answer ({reason}); is the server running?") from error
    if reply.status != 200:
        raise BenchError(f"{config.url}{path} answers {reply.status}: {reply.body[:300].decode('utf-8', 'replace')}")
    return reply.body


async def settle(config: LoadConfig, api_key: str) -> LoadConfig:
    """The configuration with what the server tells: model, path of the tokenizer, overhead of the chat template.

    Raises BenchError when the server does not answer, has no such model, or no tokenizer is found.
    """
    found = await ask_json(config, api_key, "GET", "/v1/models")
    try:
        models = msgspec.json.decode(found, type=_Models).data
    except msgspec.DecodeError as error:
        raise BenchError(f"{config.url}/v1/models is no list of models ({error}); is it an OpenAI server?") from error
    if not models:
        raise BenchError(f"{config.url} serves no model")
    chosen = next((model for model in models if model.id == config.model), None)
    if chosen is None and config.model:
        raise BenchError(f"{config.url} serves {', '.join(model.id for model in models)}, not {config.model}")
    model = chosen or models[0]
    tokenizer = find_tokenizer(config.tokenizer, model.id, model.root or "")
    config = msgspec.structs.replace(config, model=model.id, tokenizer=str(tokenizer))
    if config.endpoint == "chat" and config.chat_overhead < 0:
        config = msgspec.structs.replace(config, chat_overhead=await _chat_overhead(config, api_key))
    return config


async def _chat_overhead(config: LoadConfig, api_key: str) -> int:
    """Tokens that the chat template puts around one message, found by asking; -1 if the server does not count."""
    body = {"model": config.model, "messages": [{"role": "user", "content": _PROBE}], "max_completion_tokens": 1}
    answer = await ask_json(config, api_key, "POST", PATHS["chat"], body)
    prompt_tokens: int
    try:
        prompt_tokens = msgspec.json.decode(answer, type=_Counted).usage.prompt_tokens
    except msgspec.DecodeError:
        return -1
    return prompt_tokens - TokenWords.from_file(Path(config.tokenizer)).count(_PROBE)


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Counted(msgspec.Struct):
    usage: _Usage


async def ask_text(config: LoadConfig, api_key: str, body: dict[str, Any]) -> str:
    """The text of one answer, streamed. Raises BenchError when it fails."""
    address = parse_url(config.url)
    pool = Pool(address)
    answer = Answer(Record(id=0), 0.0, Manner(), keep_text=True)
    request = request_bytes(address, "POST", PATHS[config.endpoint], msgspec.json.encode(body), api_key)
    await answer.run(pool, request, config.timeout)
    pool.close()
    if answer.record.error:
        raise BenchError(f"asked again, {config.url} fails: {answer.record.error}: {answer.record.detail}")
    return "".join(answer.text)
