"""Recorded chats: ShareGPT files and others of its kind. Only what users said is asked; the server answers."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Literal, Turn, Words
from bench.workloads.lengths import parse_length, parse_seconds

_STREAM = 0x5A6E  # keeps these draws apart from others with the same seed
_USERS = ("human", "user")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bard", "model")
_ANSWERS_KEPT = 1 << 16


class Chat(msgspec.Struct, kw_only=True):
    """What was said in one recorded chat."""

    system: str = ""
    asked: list[tuple[str, str]] = []  # question, recorded answer or ""


def sharegpt(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """The chats of `config.data` in random order, again and again, with `think` seconds before each further question.

    An answer is asked to be as long as the recorded one, else `output_len`. Raises BenchError.
    """
    chats = read_chats(Path(config.data))
    outputs, think = parse_length(config.output_len), parse_seconds(config.think)
    count = lru_cache(_ANSWERS_KEPT)(words.count)
    rng = np.random.default_rng((seed, _STREAM))
    while True:
        for number in rng.permutation(len(chats)).tolist():
            chat = chats[number]
            yield Conversation(
                system=(Literal(chat.system),) if chat.system else (),
                turns=[
                    Turn(
                        text=(Literal(question),),
                        output_tokens=max(1, count(answer)) if answer else outputs.sample(rng),
                        think=think.sample(rng) / 1e3 if turn else 0.0,
                    )
                    for turn, (question, answer) in enumerate(chat.asked)
                ],
            )


def read_chats(path: Path) -> list[Chat]:
    """The chats of a JSON list or of JSON lines; those without a question are left out.

    One is an object with `conversations` (a list of `from`, `value`), `messages` (`role`, `content`), `turns` (texts of
    the user alone) or one text as `prompt` or `question`, perhaps with its `answer`. Raises BenchError.
    """
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise BenchError(f"cannot read the chats in {path}: {error}") from error
    entries: list[Any] = []
    if content.lstrip().startswith(b"["):
        entries = _decode(content, f"{path}")
    else:
        lines = enumerate(content.splitlines(), 1)
        entries = [_decode(line, f"{path}:{number}") for number, line in lines if line.strip()]
    chats = [chat for chat in map(_chat, entries) if chat.asked]
    if not chats:
        raise BenchError(
            f'{path} has no chat with a question; one is {{"conversations": [{{"from": "human", "value": "..."}}, '
            '{"from": "gpt", "value": "..."}]}'
        )
    return chats


def _decode(content: bytes, where: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{where} is no JSON: {error}") from error


def _chat(entry: Any) -> Chat:
    """What an entry holds; nothing where it is of another kind. Answers before the first question are left out."""
    chat = Chat()
    for who, text in _spoken(entry) if isinstance(entry, dict) else ():
        if not isinstance(text, str) or not text.strip():
            continue
        if who in _USERS:
            chat.asked.append((text, ""))
        elif who in _ANSWERS and chat.asked and not chat.asked[-1][1]:
            chat.asked[-1] = (chat.asked[-1][0], text)
        elif who == "system" and not chat.asked:
            chat.system = text
    return chat


def _spoken(entry: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Who said what, unchecked."""
    messages, turns = entry.get("conversations") or entry.get("messages"), entry.get("turns")
    if isinstance(messages, list):
        for message in messages:
            if isinstance(message, dict):
                yield message.get("from", message.get("role")), message.get("value", message.get("content"))
    elif isinstance(turns, list):
        yield from (("user", text) for text in turns)
    else:
        yield "user", entry.get("prompt") or entry.get("question")
        yield "assistant", entry.get("answer")
