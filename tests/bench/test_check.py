"""Checks find what differs, and only that."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.check import check_expected, check_greedy, difference, expected_answers, require_greedy
from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.record import Record
from bench.measure.record_files import write_records

CONFIG = LoadConfig(url="http://127.0.0.1:1")


def answer(id: int, text: str = "a text", **more: Any) -> Record:
    given_fields = {"prompt_digest": f"digest {id}", "output_tokens": 8} | more
    return Record(id=id, text=text, **given_fields)


class Again:
    """Answers as it did before, but for some requests."""

    def __init__(self, changed: dict[int, str] | None = None, failing: int = -1) -> None:
        self.asked: list[int] = []
        self._changed = changed or {}
        self._failing = failing

    async def ask(self, record: Record) -> str:
        self.asked.append(record.id)
        if record.id == self._failing:
            raise BenchError("asked again, it fails: http_503")
        return self._changed.get(record.id, record.text)


async def test_equal_answers_are_equal() -> None:
    again = Again()
    check = await check_greedy(CONFIG, [answer(id) for id in range(100)], again.ask)
    assert (check.mode, check.compared, check.equal, check.different) == ("greedy", 20, 20, [])
    assert len(set(again.asked)) == 20 and again.asked == sorted(again.asked)


async def test_the_seed_chooses_the_sample() -> None:
    records = [answer(id) for id in range(1000)]
    first, second, other = Again(), Again(), Again()
    await check_greedy(CONFIG, records, first.ask, sample=5)
    await check_greedy(CONFIG, records, second.ask, sample=5)
    await check_greedy(CONFIG, records, other.ask, sample=5, seed=1)
    assert first.asked == second.asked != other.asked and len(other.asked) == 5


async def test_only_whole_answers_with_text_are_asked_again() -> None:
    records = [
        answer(0),
        answer(1, text=""),
        answer(2, error="timeout"),
        answer(3, client="disconnect"),
        answer(4, warmup=True),
        answer(5),
    ]
    again = Again()
    check = await check_greedy(CONFIG, records, again.ask)
    assert again.asked == [0, 5] and check.compared == 2


async def test_nothing_to_ask_is_nothing_compared() -> None:
    check = await check_greedy(CONFIG, [], Again().ask)
    assert (check.compared, check.equal) == (0, 0)


async def test_what_differs_is_shown() -> None:
    records = [answer(id, text="The quick brown fox jumps over the lazy dog.") for id in range(4)]
    again = Again({2: "The quick brown fox jumped over the lazy dog."}, failing=3)
    check = await check_greedy(CONFIG, records, again.ask)
    assert (check.compared, check.equal) == (4, 2)
    assert check.different == [
        "request 2: at character 24 …'quick brown fox jumps over the lazy dog.' "
        "became …'quick brown fox jumped over the lazy dog'…",
        "request 3: asked again, it fails: http_503",
    ]


@pytest.mark.parametrize(
    "more", [{"temperature": 0.7}, {"temperature": None}, {"extra_body": {"temperature": 1}}], ids=str
)
async def test_answers_that_vary_are_not_compared(more: dict[str, Any]) -> None:
    config = msgspec.structs.replace(CONFIG, **more)
    again = Again()
    with pytest.raises(BenchError, match="--temperature 0"):
        await check_greedy(config, [answer(0)], again.ask)
    assert not again.asked


def test_a_temperature_of_zero_is_greedy() -> None:
    require_greedy(CONFIG)
    require_greedy(msgspec.structs.replace(CONFIG, temperature=1.0, extra_body={"temperature": 0}))


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_difference_is_where_texts_part(one: str, other: str) -> None:
    if one == other:
        return
    at = int(difference(one, other).split()[2])
    assert one[:at] == other[:at] and one[at : at + 1] != other[at : at + 1]


@pytest.mark.parametrize(
    ("expected", "found", "line"),
    [
        ("abc", "abd", "at character 2 'abc' became 'abd'"),
        ("abc", "ab", "at character 2 'abc' became 'ab'"),
        ("", "x\n", r"at character 0 '' became 'x\n'"),
        ("a" * 50, "a" * 30, f"at character 30 …'{'a' * 40}' became …'{'a' * 20}'"),
    ],
)
def test_a_difference_shows_what_is_around(expected: str, found: str, line: str) -> None:
    assert difference(expected, found) == line


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_answers_are_compared_with_a_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"before.{ending}"
    write_records(path, [answer(id, text=f"text {id}") for id in (2, 1, 0)])
    now = [answer(0, "text 0"), answer(1, "text x"), answer(2, "text 2", output_tokens=9), answer(3, "text 3")]
    check = check_expected(now, expected_answers(path))
    assert (check.mode, check.compared, check.equal, check.unmatched) == ("expect", 2, 1, 2)
    assert check.different == ["request 1: at character 5 'text 1' became 'text x'"]


def test_any_recorded_answer_to_a_prompt_is_right(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    write_records(path, [answer(id, text, prompt_digest="same") for id, text in enumerate(("one", "two"))])
    now = [answer(id, text, prompt_digest="same") for id, text in enumerate(("two", "one", "three"))]
    check = check_expected(now, expected_answers(path))
    assert (check.compared, check.equal) == (3, 2)
    assert check.different == ["request 2: at character 0 'one' became 'three'"]


def test_differences_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    write_records(path, [answer(id, "one") for id in range(50)])
    check = check_expected([answer(id, "two") for id in range(50)], expected_answers(path))
    assert (check.compared, check.equal, len(check.different)) == (50, 0, 20)


def test_a_file_without_answers_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "before.jsonl"
    write_records(path, [answer(0, text=""), answer(1, error="timeout")])
    with pytest.raises(BenchError, match=r"before\.jsonl has no answers: make it with --records .* --keep-text"):
        check_expected([answer(0)], expected_answers(path))
    with pytest.raises(BenchError, match="cannot be read"):
        expected_answers(tmp_path / "none.jsonl")
