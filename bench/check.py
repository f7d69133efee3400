"""Are the answers right? Asked again, or compared with those of an earlier run."""

from collections.abc import Awaitable, Callable
from itertools import takewhile
from pathlib import Path

import numpy as np

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.record import Record
from bench.measure.record_files import read_records
from bench.measure.summary import completed
from bench.measure.summary_format import Check

_AROUND = 20  # characters shown on either side of where two texts part
_SHOWN = 20  # lines of differences at most

Ask = Callable[[Record], Awaitable[str]]
Answers = dict[tuple[str, int], list[str]]


def require_greedy(config: LoadConfig) -> None:
    """Raises BenchError unless answers are the same whenever they are asked for."""
    if config.extra_body.get("temperature", config.temperature) != 0:
        raise BenchError("--check greedy compares answers that must not vary: it needs --temperature 0")


async def check_greedy(config: LoadConfig, records: list[Record], ask: Ask, sample: int = 20, seed: int = 0) -> Check:
    """Asks for `sample` of the completed answers whose text was kept again, one at a time, and compares the texts.

    The seed chooses them. One that fails this time differs. Raises BenchError when answers are not greedy.
    """
    require_greedy(config)
    kept = _kept(records)
    chosen = np.random.default_rng(seed).choice(len(kept), size=min(sample, len(kept)), replace=False)
    check = Check(mode="greedy")
    for record in (kept[index] for index in sorted(chosen)):
        try:
            again = await ask(record)
        except BenchError as error:
            _add(check, record, str(error), equal=False)
        else:
            _add(check, record, difference(record.text, again), equal=again == record.text)
    return check


def expected_answers(path: Path) -> Answers:
    """Texts by digest of the prompt and tokens asked for. Raises BenchError for a file without any."""
    answers: Answers = {}
    for record in _kept(read_records(path)):
        answers.setdefault((record.prompt_digest, record.output_tokens), []).append(record.text)
    if not answers:
        raise BenchError(f"{path} has no answers: make it with --records {path} --keep-text")
    return answers


def check_expected(records: list[Record], answers: Answers) -> Check:
    """Compares completed answers whose text was kept with recorded ones. Of several to one prompt, any is right."""
    check = Check(mode="expect")
    for record in _kept(records):
        expected = answers.get((record.prompt_digest, record.output_tokens))
        if expected is None:
            check.unmatched += 1
        else:
            _add(check, record, difference(expected[0], record.text), equal=record.text in expected)
    return check


def difference(expected: str, found: str) -> str:
    """Where two texts part, with a few characters around; positions are in characters from 0."""
    at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(expected, found, strict=False)))
    return f"at character {at} {_excerpt(expected, at)} became {_excerpt(found, at)}"


def _kept(records: list[Record]) -> list[Record]:
    return [record for record in completed(records) if record.text]


def _add(check: Check, record: Record, line: str, equal: bool) -> None:
    check.compared += 1
    check.equal += equal
    if not equal and len(check.different) < _SHOWN:
        check.different.append(f"request {record.id}: {line}")


def _excerpt(text: str, at: int) -> str:
    before = "…" if at > _AROUND else ""
    after = "…" if len(text) > at + _AROUND else ""
    return f"{before}{text[max(0, at - _AROUND) : at + _AROUND]!r}{after}"
