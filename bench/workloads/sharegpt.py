"""Recorded chats: ShareGPT files and others of its kind. Only what users said is asked; the server answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Literal, Turn, Words
from bench.workloads.lengths import Length, parse_length, parse_seconds

_STREAM = 0x5A6E  # keeps these draws apart from others with the same seed
_USERS = ("human", "user")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bard", "model")

Said = list[tuple[str, str]]  # (question, recorded answer or "")


def sharegpt(config: WorkloadConfig, seed: int, words: Words) -> Iterator[Conversation]:
    """The chats of `config.data` in random order, again and again.

    A JSON list, or JSON lines, of objects with `conversations` (from, value), `messages` (role, content), `turns`
    (texts) or `prompt` or `question` (a text). An answer is asked to be as long as the recorded one, else `output_len`.
    Raises BenchError.
    """
    chats = [said for said in map(_said, _entries(Path(config.data))) if said]
    if not chats:
        raise BenchError(f"{config.data} has no chat with a question in it")
    outputs, think = parse_length(config.output_len), parse_seconds(config.think)
    rng = np.random.default_rng((seed, _STREAM))
    while True:
        for i in rng.permutation(len(chats)).tolist():
            yield Conversation(
                turns=[
                    Turn(
                        text=(Literal(question),),
                        output_tokens=_length(answer, words, outputs, rng),
                        think=think.sample(rng) / 1e3 if turn else 0.0,
                    )
                    for turn, (question, answer) in enumerate(chats[i])
                ]
            )


def _length(answer: str, words: Words, outputs: Length, rng: np.random.Generator) -> int:
    return max(1, words.count(answer)) if answer else outputs.sample(rng)


def _entries(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the chats in {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            entries: list[Any] = json.loads(text)
        except ValueError as error:
            raise BenchError(f"{path} is no JSON: {error}") from error
        return entries
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                raise BenchError(f"{path}:{number} is no JSON: {error}") from error
    return entries


def _said(entry: Any) -> Said:
    """Questions and answers of one entry; what was said before the first question is left out."""
    if not isinstance(entry, dict):
        return []
    spoken: list[tuple[str, str]] = []  # who, what
    for message in entry.get("conversations") or entry.get("messages") or []:
        if isinstance(message, dict):
            who, what = message.get("from", message.get("role")), message.get("value", message.get("content"))
            if isinstance(who, str) and isinstance(what, str) and what.strip():
                spoken.append((who, what))
    for text in entry.get("turns") or [entry.get("prompt") or entry.get("question")]:
        if isinstance(text, str) and text.strip():
            spoken.append(("user", text))
    said: Said = []
    for who, what in spoken:
        if who in _USERS:
            said.append((what, ""))
        elif who in _ANSWERS and said and not said[-1][1]:
            said[-1] = (said[-1][0], what)
    return said
