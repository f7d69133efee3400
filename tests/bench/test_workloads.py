"""What workloads ask, and the distributions and mixes that they are made of."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Workload
from bench.workloads.lengths import parse_length, parse_seconds
from bench.workloads.mix import parse_mix
from bench.workloads.multi_turn import multi_turn
from bench.workloads.random import random
from bench.workloads.registry import SAMPLES
from bench.workloads.shared_prefix import shared_prefix
from bench.workloads.sharegpt import read_chats, sharegpt
from bench.workloads.sonnet import sonnet
from bench.workloads.words import TokenWords
from engine.weights.resolve import resolve

POEMS = (SAMPLES / "sonnets.txt").read_text()


# Lengths


@pytest.mark.parametrize(
    ("text", "mean", "deviation", "low", "high"),
    [
        ("256", 256, 0, 256, 256),
        ("100-300", 200, 58, 100, 300),
        ("normal:256,64", 256, 64, 1, 1000),
        ("normal:256,0", 256, 0, 256, 256),
        ("lognormal:256,128", 256, 128, 1, 10_000),
        ("exp:256", 256, 256, 1, 10_000),
        ("normal:200,50,1-210", 182, 33, 1, 210),
        (" exp:100,50-60 ", 55.8, 4.84, 50, 60),
    ],
)
def test_lengths_follow_their_distribution(text: str, mean: float, deviation: float, low: int, high: int) -> None:
    rng = np.random.default_rng(3)
    length = parse_length(text)
    drawn = [length.sample(rng) for _ in range(20_000)]
    assert all(type(value) is int for value in drawn)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert np.std(drawn) == pytest.approx(deviation, rel=0.05)
    assert min(drawn) >= low and max(drawn) <= high


def test_lengths_are_never_below_one() -> None:
    rng = np.random.default_rng(3)
    for text in ("normal:2,50", "exp:0.1", "lognormal:1,9"):
        length = parse_length(text)
        assert min(length.sample(rng) for _ in range(2000)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "abc",
        "300-100",
        "1.5",
        "1-2-3",
        "99999999999",
        "zipf:1",
        "normal:256",
        "normal:0,5",
        "exp:256,64",
        "exp:1,5-2",
        "normal:9,6,0-9",
    ],
)
def test_texts_that_are_no_length(text: str) -> None:
    with pytest.raises(BenchError, match="length"):
        parse_length(text)


def test_seconds_are_drawn_in_milliseconds() -> None:
    rng = np.random.default_rng(3)
    assert [parse_seconds(text).sample(rng) for text in ("0", "1.5", " 2 ")] == [0, 1500, 2000]
    assert all(500 <= parse_seconds("0.5-2").sample(rng) <= 2000 for _ in range(100))
    exponential = parse_seconds("exp:3")
    assert np.mean([exponential.sample(rng) for _ in range(20_000)]) == pytest.approx(3000, rel=0.03)
    for text in ("", "x", "-1", "2-1", "exp:", "1s"):
        with pytest.raises(BenchError, match="time"):
            parse_seconds(text)


# Unruly clients


def test_clients_come_in_their_shares() -> None:
    mix = parse_mix("slow=5%, disconnect=0.1,cancel=5%,bad=5%")
    rng = np.random.default_rng(5)
    clients = [mix.client(rng) for _ in range(20_000)]
    for kind, share in {"slow": 0.05, "disconnect": 0.1, "cancel": 0.05, "bad": 0.05, "normal": 0.75}.items():
        assert clients.count(kind) / len(clients) == pytest.approx(share, abs=0.01)


def test_mixes_at_the_bounds() -> None:
    rng = np.random.default_rng(5)
    assert {parse_mix("").client(rng) for _ in range(100)} == {"normal"}
    assert {parse_mix("bad=100%").client(rng) for _ in range(100)} == {"bad"}
    assert "slow" not in {parse_mix("slow=0%").client(rng) for _ in range(100)}
    assert parse_mix("slow=69%,cancel=30%,bad=1%")


@pytest.mark.parametrize("text", ["slow=60%,bad=41%", "slow=5", "lazy=5%", "slow", "slow=-5%", "slow=1%,slow=1%"])
def test_texts_that_are_no_mix(text: str) -> None:
    with pytest.raises(BenchError, match="--mix"):
        parse_mix(text)


# Workloads


@pytest.fixture(scope="session")
def words() -> TokenWords:
    return TokenWords.from_file(resolve() / "tokenizer.json")


@pytest.fixture(scope="session")
def encode() -> Callable[[str], list[int]]:
    """Token ids of a prompt, as the model's own tokenizer sees it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve() / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def conversations(
    make: Workload, words: TokenWords, number: int, seed: int = 7, **config: object
) -> list[Conversation]:
    return list(islice(make(WorkloadConfig(**config), seed, words), number))


def leading(a: list[int], b: list[int]) -> int:
    """Leading ids that are equal."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


CASES: dict[str, tuple[Workload, str]] = {
    "random": (random, ""),
    "shared-prefix": (shared_prefix, ""),
    "multi-turn": (multi_turn, ""),
    "sonnet": (sonnet, "sonnets.txt"),
    "sharegpt": (sharegpt, "conversations.json"),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_seeds_ask_the_same(name: str, words: TokenWords) -> None:
    make, sample = CASES[name]
    config = {"data": str(SAMPLES / sample), "input_len": "5-90", "output_len": "exp:30", "turns": "1-4"}
    first, again, other = (conversations(make, words, 40, seed, **config) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert all(turn.output_tokens >= 1 for conversation in first for turn in conversation.turns)


def test_random_prompts_share_nothing(words: TokenWords, encode: Callable[[str], list[int]]) -> None:
    asked = conversations(random, words, 50, input_len="20-400", prefix_len=128)
    prompts = [encode(words.render(conversation.turns[0].text)) for conversation in asked]
    for conversation, ids in zip(asked, prompts, strict=True):
        [turn] = conversation.turns
        assert len(ids) == sum(part.tokens for part in turn.text)
        assert 20 <= len(ids) <= 400 and turn.shared_tokens == 0 and not conversation.system
    assert max(leading(a, b) for a in prompts for b in prompts if a is not b) <= 2
    assert len({len(ids) for ids in prompts}) > 20


def test_groups_share_their_prefix_and_no_more(words: TokenWords, encode: Callable[[str], list[int]]) -> None:
    asked = conversations(shared_prefix, words, 60, input_len="10-50", prefix_len=77, groups=4)
    seen: list[list[int]] = []
    for conversation in asked:
        [turn] = conversation.turns
        ids = encode(words.render(turn.text))
        assert 87 <= len(ids) <= 127
        longest = max((leading(ids, before) for before in seen), default=0)
        assert turn.shared_tokens <= longest <= turn.shared_tokens + 2  # tails may begin with the same word
        seen.append(ids)
    assert len({tuple(ids[:77]) for ids in seen}) == 4
    assert sum(conversation.turns[0].shared_tokens for conversation in asked) == 56 * 77


@pytest.mark.parametrize("wrong", [{"groups": 0}, {"prefix_len": 0}])
def test_shared_prefix_needs_groups_and_a_prefix(wrong: dict[str, int], words: TokenWords) -> None:
    with pytest.raises(BenchError, match="--groups and --prefix-len"):
        conversations(shared_prefix, words, 1, **wrong)


def test_chats_have_turns_and_time_to_think(words: TokenWords) -> None:
    chats = conversations(multi_turn, words, 80, turns="2-5", think="0.5-2", input_len="30-60", prefix_len=40)
    assert {len(chat.turns) for chat in chats} == {2, 3, 4, 5}
    assert len({words.render(chat.system) for chat in chats}) == 1
    assert words.count(words.render(chats[0].system)) == 40
    for chat in chats:
        first, *others = chat.turns
        assert first.think == 0 and all(0.5 <= turn.think <= 2 for turn in others)
    questions = [words.render(turn.text) for chat in chats for turn in chat.turns]
    assert len(set(questions)) == len(questions)
    assert {words.count(question) for question in questions} <= set(range(30, 61))
    assert conversations(multi_turn, words, 1, prefix_len=0)[0].system == ()


def test_sonnet_prompts_are_lines_of_exact_length(words: TokenWords) -> None:
    lines = set(POEMS.splitlines())
    asked = conversations(sonnet, words, 60, data=str(SAMPLES / "sonnets.txt"), input_len="3-700")
    for conversation in asked:
        [turn] = conversation.turns
        text = words.render(turn.text)
        assert words.count(text) == turn.text[0].tokens
        *whole, _ = text.splitlines()
        assert lines.issuperset(whole)


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\xff\xfe\x00"])
def test_poems_that_cannot_be_read(content: bytes | None, words: TokenWords, tmp_path: Path) -> None:
    path = tmp_path / "poems.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError, match=r"poems\.txt"):
        conversations(sonnet, words, 1, data=str(path))


# Recorded chats


def test_the_sample_is_asked_in_full_before_it_comes_again(words: TokenWords) -> None:
    path = SAMPLES / "conversations.json"
    recorded = read_chats(path)
    twice = conversations(sharegpt, words, 2 * len(recorded), data=str(path), think="0")
    rounds = [
        ["\n".join(words.render(turn.text) for turn in chat.turns) for chat in part]
        for part in (twice[: len(recorded)], twice[len(recorded) :])
    ]
    questions = sorted("\n".join(question for question, _ in chat.asked) for chat in recorded)
    assert sorted(rounds[0]) == sorted(rounds[1]) == questions
    assert rounds[0] != rounds[1]
    answers = {question: answer for chat in recorded for question, answer in chat.asked}
    for chat in twice:
        for turn in chat.turns:
            assert turn.output_tokens == words.count(answers[words.render(turn.text)])


SHAPES: dict[str, tuple[object, list[tuple[str, str]]]] = {
    "ShareGPT": (
        {
            "conversations": [
                {"from": "gpt", "value": "Hm"},
                {"from": "human", "value": "A"},
                {"from": "gpt", "value": "B"},
            ]
        },
        [("A", "B")],
    ),
    "OpenAI": (
        {"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]}
        | {"question": "not this one"},
        [("A", "B")],
    ),
    "two questions": (
        {"messages": [{"role": "user", "content": "A"}, {"role": "user", "content": "B"}]},
        [("A", ""), ("B", "")],
    ),
    "MT-Bench": ({"question_id": 81, "turns": ["A", "B"]}, [("A", ""), ("B", "")]),
    "GSM8K": ({"question": "A", "answer": "B"}, [("A", "B")]),
    "prompt": ({"prompt": "A"}, [("A", "")]),
}


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_of_chats(shape: str, lines: bool, tmp_path: Path) -> None:
    entry, asked = SHAPES[shape]
    path = tmp_path / "chats"
    text = json.dumps(entry)
    path.write_text(f"\ufeff{text}\n\n{text}\n" if lines else f"[{text}, {text}, {{}}, 5, null]", encoding="utf-8")
    assert [chat.asked for chat in read_chats(path)] == [asked, asked]


def test_system_prompts_and_answers_of_unknown_length(words: TokenWords, tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('[{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "A"}]}]')
    [chat] = conversations(sharegpt, words, 1, data=str(path), output_len="33")
    assert words.render(chat.system) == "S"
    assert [(words.render(turn.text), turn.output_tokens) for turn in chat.turns] == [("A", 33)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "no chat with a question"),
        (b"[]", "no chat with a question"),
        (b'[{"conversations": [{"from": "gpt", "value": "B"}]}]', "no chat with a question"),
        (b'{"prompt": ["A"], "turns": "no list"}', "no chat with a question"),
        (b"[{]", "chats is no JSON"),
        (b'{"prompt": "A"}\nnonsense\n', "chats:2 is no JSON"),
        (b'{"prompt": "\xff"}', "chats:1 is no JSON"),
    ],
)
def test_chats_that_cannot_be_read(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "chats"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BenchError, match=message):
        read_chats(path)
