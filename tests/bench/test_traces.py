"""Traces: their sharing is exact to the token, their times come out as asked, and bad files are named by line."""

import json
import math
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bench.config import WorkloadConfig
from bench.errors import BenchError
from bench.workloads.base import Conversation, Synthetic
from bench.workloads.length_traces import length_trace, read_lengths
from bench.workloads.mooncake import EndlessCache, mooncake, read_mooncake
from bench.workloads.registry import SAMPLES, WORKLOADS, kind_of, workload
from bench.workloads.trace_time import dequantise, parse_window, schedule
from bench.workloads.words import TokenWords
from engine.weights.resolve import resolve

MOONCAKE = SAMPLES / "mooncake_sample.jsonl"
SEED = 11


@pytest.fixture(scope="session")
def tokenizer_file() -> Path:
    return resolve() / "tokenizer.json"


@pytest.fixture(scope="session")
def words(tokenizer_file: Path) -> TokenWords:
    return TokenWords.from_file(tokenizer_file)


@pytest.fixture(scope="session")
def encode(words: TokenWords, tokenizer_file: Path):
    """Token ids of a conversation's only prompt, as the model's own tokenizer sees it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))

    def encode(conversation: Conversation) -> np.ndarray:
        [turn] = conversation.turns
        return np.array(tokenizer.encode(words.render(turn.text)).ids)

    return encode


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Leading ids that are equal."""
    shorter = min(len(a), len(b))
    differ = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(differ[0]) if len(differ) else shorter


def size(conversation: Conversation) -> int:
    return sum(part.tokens for turn in conversation.turns for part in turn.text)


def write_trace(path: Path, *lines: tuple[float, int, list[int]]) -> WorkloadConfig:
    """A Mooncake file of (ms, input length, hash ids)."""
    rows = [{"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": ids} for at, n, ids in lines]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return WorkloadConfig(data=str(path))


def mooncake_rows() -> list[dict]:
    return [json.loads(line) for line in MOONCAKE.read_text().splitlines()]


def replayed_rows() -> list[dict]:
    """The sample's lines in the order of the replay."""
    rows = mooncake_rows()
    times = np.array([row["timestamp"] for row in rows]) / 1e3
    return [rows[row] for row in schedule(times, WorkloadConfig(), SEED)[0]]


# Mooncake: text


@pytest.fixture(scope="module")
def scaled() -> list[Conversation]:
    return list(mooncake(WorkloadConfig(data=str(MOONCAKE), length_scale=1 / 16), SEED, None))


@pytest.fixture(scope="module")
def scaled_ids(scaled, encode) -> list[np.ndarray]:
    return [encode(conversation) for conversation in scaled]


def test_prompts_arrive_with_the_exact_number_of_tokens(scaled, scaled_ids) -> None:
    rows = replayed_rows()
    assert len(scaled_ids) == len(rows) == 300
    for row, ids, conversation in zip(rows, scaled_ids, scaled, strict=True):
        assert len(ids) == math.ceil(row["input_length"] / 16)
        assert conversation.turns[0].output_tokens == max(1, round(row["output_length"] / 16))


def test_equal_leading_hash_ids_are_equal_leading_tokens_and_the_next_differs(scaled_ids) -> None:
    rows = replayed_rows()
    deepest = 0
    for number, row in enumerate(rows[1:], 1):
        ids = np.array(row["hash_ids"])
        # The earlier request that shares most; where several do, the last.
        blocks, other = max((common(ids, np.array(rows[n]["hash_ids"])), n) for n in range(number))
        whole = min(len(scaled_ids[number]), len(scaled_ids[other]))
        assert common(scaled_ids[number], scaled_ids[other]) == min(32 * blocks, whole)
        deepest = max(deepest, blocks)
    assert deepest > 20  # the sample holds follow-up turns of conversations


def test_unscaled_blocks_are_512_tokens(encode) -> None:
    conversations = list(mooncake(WorkloadConfig(data=str(MOONCAKE), limit=12), SEED, None))
    rows, ids = replayed_rows(), [encode(conversation) for conversation in conversations]
    for row, (a, b) in zip(rows, pairwise(ids), strict=False):
        assert len(a) == row["input_length"]
        assert common(a, b) == 512


def test_shared_tokens_are_what_a_search_among_all_earlier_prompts_finds(scaled, scaled_ids) -> None:
    found = [max(common(ids, other) for other in scaled_ids[:n]) for n, ids in enumerate(scaled_ids) if n]
    told = [conversation.turns[0].shared_tokens for conversation in scaled]
    assert told[0] == 0
    # Two blocks may begin with the same word by chance, one in some thousands: no more than that may be found.
    excess = np.array(found) - told[1:]
    assert excess.min() == 0
    assert excess.max() <= 1
    assert np.count_nonzero(excess) < 0.1 * len(excess)


def test_a_last_block_that_is_not_full_shares_with_its_own_id_only(tmp_path: Path, encode) -> None:
    config = write_trace(
        tmp_path / "t.jsonl",
        (0, 700, [0, 1]),
        (10, 1024, [0, 1]),  # the same block, now full
        (20, 800, [0, 1]),
        (30, 700, [0, 2]),
        (40, 1500, [0, 1, 3]),
        (50, 600, [9, 1]),  # the same id behind another beginning
        (60, 512, [0]),
    )
    conversations = list(mooncake(config, SEED, None))
    ids = [encode(conversation) for conversation in conversations]
    assert [len(prompt) for prompt in ids] == [700, 1024, 800, 700, 1500, 600, 512]
    assert [c.turns[0].shared_tokens for c in conversations] == [0, 700, 800, 512, 1024, 0, 512]
    assert [max(common(ids[n], ids[m]) for m in range(n)) for n in range(1, 7)] == [700, 800, 512, 1024, 0, 512]


def test_a_cache_counts_a_block_as_far_as_it_was_seen() -> None:
    cache = EndlessCache()
    assert cache.admit([(1, 32), (2, 10)]) == 0
    assert cache.admit([(1, 32), (2, 20)]) == 42
    assert cache.admit([(1, 32), (2, 32), (3, 1)]) == 52
    assert cache.admit([(1, 32), (2, 32), (3, 5)]) == 65
    assert cache.admit([(2, 32), (3, 1)]) == 0
    assert cache.admit([(1, 32), (2, 10)]) == 42


def test_too_many_hash_ids_are_dropped_and_too_few_are_made_up(tmp_path: Path, encode) -> None:
    config = write_trace(
        tmp_path / "t.jsonl",
        (0, 600, [0, 1, 2, 3]),
        (10, 2000, [0, 1]),
        (20, 2000, [0, 1]),  # equal to the one before only as far as the ids go
        (30, 100, []),
    )
    conversations = list(mooncake(config, SEED, None))
    ids = [encode(conversation) for conversation in conversations]
    assert [len(prompt) for prompt in ids] == [600, 2000, 2000, 100]
    assert [c.turns[0].shared_tokens for c in conversations] == [0, 600, 1024, 0]
    assert common(ids[1], ids[2]) == 1024


@pytest.mark.parametrize(("scale", "block"), [(1 / 16, 32), (0.1, 51), (1 / 512, 1), (1 / 4096, 1), (2, 1024)])
def test_scale_keeps_blocks_in_step(tmp_path: Path, scale: float, block: int) -> None:
    lengths = (1, 511, 512, 513, 5 * 512 + 256)
    config = write_trace(tmp_path / "t.jsonl", *((10 * n, n, list(range(math.ceil(n / 512)))) for n in lengths))
    made = list(mooncake(WorkloadConfig(data=config.data, length_scale=scale), SEED, None))
    for tokens, conversation in zip(lengths, made, strict=True):
        *full, last = [part.tokens for part in conversation.turns[0].text]
        assert full == [block] * ((tokens - 1) // 512)
        assert last == math.ceil((tokens - 512 * len(full)) * block / 512) >= 1


def test_another_seed_is_another_text_with_the_same_sharing() -> None:
    config = WorkloadConfig(data=str(MOONCAKE), limit=50)
    one, again, other = (list(mooncake(config, seed, None)) for seed in (1, 1, 2))
    assert one == again
    assert {part.seed for c in one for part in c.turns[0].text}.isdisjoint(
        part.seed for c in other for part in c.turns[0].text
    )


# Times


def test_a_coarse_clock_is_spread_over_its_ticks_and_sorted() -> None:
    raw = np.array([row["timestamp"] for row in mooncake_rows()]) / 1e3
    times = dequantise(raw, SEED)
    assert np.array_equal(times, dequantise(raw, SEED))
    assert not np.array_equal(times, dequantise(raw, SEED + 1))
    moved = times - raw
    assert moved.min() >= 0
    assert 2.5 < moved.max() < 3.001
    assert abs(moved.mean() - 1.5) < 0.2
    starts = [conversation.at for conversation in mooncake(WorkloadConfig(data=str(MOONCAKE)), SEED, None)]
    assert starts[0] == 0
    assert all(a < b for a, b in pairwise(starts))


@pytest.mark.parametrize("times", [[0.0, 1.0, 1.0, 2.5], [4.0, 4.0, 4.0], [7.0]])
def test_a_fine_clock_and_a_single_moment_stay(times: list[float]) -> None:
    assert dequantise(np.array(times), SEED).tolist() == times


TIMES = np.array([500.0, 400.0, 460.0, 520.0, 640.0])  # seconds 100, 0, 60, 120 and 240 of the trace


@pytest.mark.parametrize(
    ("asked", "rows", "starts"),
    [
        ({}, [1, 2, 0, 3, 4], [0, 60, 100, 120, 240]),
        ({"speed": 2.0}, [1, 2, 0, 3, 4], [0, 30, 50, 60, 120]),
        ({"window": "1m-2m"}, [2, 0], [0, 40]),  # its end does not belong to it
        ({"window": "61s-"}, [0, 3, 4], [0, 20, 140]),
        ({"window": "-2m1s", "limit": 3}, [1, 2, 0], [0, 60, 100]),
        ({"window": "61s-", "speed": 0.5, "limit": 2}, [0, 3], [0, 40]),  # the window is in trace time
        ({"limit": 99}, [1, 2, 0, 3, 4], [0, 60, 100, 120, 240]),
    ],
)
def test_window_limit_and_speed(asked: dict, rows: list[int], starts: list[float]) -> None:
    order, at = schedule(TIMES, WorkloadConfig(**asked), SEED)
    assert order.tolist() == rows
    assert at.tolist() == starts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0, math.inf)),
        ("10m-20m", (600, 1200)),
        ("90s-", (90, math.inf)),
        ("-1.5h", (0, 5400)),
        ("1h-1h30m", (3600, 5400)),
        (" 10 - 20 ", (10, 20)),
        ("500ms-1m2s", (0.5, 62)),
    ],
)
def test_windows(text: str, expected: tuple[float, float]) -> None:
    assert parse_window(text) == expected


@pytest.mark.parametrize("text", ["-", "10m", "ten-20m", "10m-20m-30m", "10d-20d", "1m30-2m", "1e3-2e3", "--", "1..5-"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(BenchError, match=r"no part of a trace.*10m-20m"):
        parse_window(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"window": "20m-10m"}, "ends before it starts"),
        ({"window": "5s-5s"}, "ends before it starts"),
        ({"window": "1h-"}, r"'1h-' holds no request.*between 0s and 240\.000s"),
        ({"window": "10s-20s"}, "holds no request"),
        ({"speed": 0.0}, "speed must be above 0"),
        ({"speed": math.nan}, "speed must be above 0"),
        ({"limit": -1}, "limit must be"),
    ],
)
def test_bad_schedules(asked: dict, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        schedule(TIMES, WorkloadConfig(**asked), SEED)


def test_what_was_before_the_window_is_not_in_the_cache(tmp_path: Path) -> None:
    data = write_trace(tmp_path / "t.jsonl", (0, 600, [0, 1]), (60_000, 600, [0, 1]), (61_000, 600, [0, 1])).data
    late = list(mooncake(WorkloadConfig(data=data, window="1m-"), SEED, None))
    assert [(c.at, c.turns[0].shared_tokens) for c in late] == [(0, 0), (1, 600)]


# Lengths


def test_the_azure_sample() -> None:
    config = WorkloadConfig(data=str(SAMPLES / "azure_sample.csv"))
    made = list(length_trace(config, SEED, None))
    assert len(made) == 300
    assert [(size(c), c.turns[0].output_tokens) for c in made[:3]] == [(374, 44), (396, 109), (879, 55)]
    assert [c.at for c in made[:3]] == pytest.approx([0, 4.314579, 4.541877], abs=1e-5)
    assert len({c.turns[0].text[0].seed for c in made}) == 300
    assert {c.turns[0].shared_tokens for c in made} == {0}


def test_prompts_of_lengths_share_nothing(encode) -> None:
    config = WorkloadConfig(data=str(SAMPLES / "azure_sample.csv"), limit=20, length_scale=0.25)
    made = list(length_trace(config, SEED, None))
    ids = [encode(conversation) for conversation in made]
    assert [len(prompt) for prompt in ids][:3] == [94, 99, 220]  # 374, 396 and 879 over 4
    assert max(common(a, b) for n, a in enumerate(ids) for b in ids[:n]) <= 1


def test_azure_2024_has_time_zones(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2024-05-10 00:00:00.009930+00:00,2162,5\r\n2024-05-10 00:00:01+00:00,2399,6\r\n"
        b"2024-05-10 02:00:02+02:00,76,7\r\n"
    )
    made = list(length_trace(WorkloadConfig(data=str(path)), SEED, None))
    assert [(size(c), c.turns[0].output_tokens) for c in made] == [(2162, 5), (2399, 6), (76, 7)]
    assert [c.at for c in made] == pytest.approx([0, 0.99007, 1.99007], abs=1e-6)


def test_burstgpt_leaves_out_requests_that_failed() -> None:
    path = SAMPLES / "burstgpt_sample.csv"
    trace = read_lengths(path)
    assert (len(trace.input_tokens), trace.skipped) == (28, 2)
    made = list(length_trace(WorkloadConfig(data=str(path), speed=10, window="40s-"), SEED, None))
    # The window counts from second 5 of the file: its first request is that of second 52.
    assert [(size(c), c.turns[0].output_tokens, c.at) for c in made[:2]] == [(388, 451, 0), (731, 164, 0.6)]


def test_tables_without_times_are_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.8\n2015,156,12.9\n\n30,3,10\n")
    made = list(length_trace(WorkloadConfig(data=str(path), limit=2), SEED, None))
    assert [(size(c), c.turns[0].output_tokens, c.at) for c in made] == [(3772, 54, None), (2015, 156, None)]
    assert len(list(length_trace(WorkloadConfig(data=str(path)), SEED, None))) == 3
    with pytest.raises(BenchError, match="no timestamps"):
        length_trace(WorkloadConfig(data=str(path), window="1m-"), SEED, None)


def test_scaled_lengths_never_vanish(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n1600,160\n3,1\n")
    made = list(length_trace(WorkloadConfig(data=str(path), length_scale=1 / 16), SEED, None))
    assert [(size(c), c.turns[0].output_tokens) for c in made] == [(100, 10), (1, 1)]


# What cannot be read


@pytest.mark.parametrize("reader", [mooncake, length_trace])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_bad_scales(reader, scale: float) -> None:
    data = MOONCAKE if reader is mooncake else SAMPLES / "azure_sample.csv"
    with pytest.raises(BenchError, match="length scale must be above 0"):
        reader(WorkloadConfig(data=str(data), length_scale=scale), SEED, None)


GOOD = '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        (GOOD.replace("hash_ids", "ids"), "hash_ids"),
        (GOOD.replace("5", '"5"', 1), r"\$\.input_length"),
        (GOOD.replace("5", "0", 1), ">= 1"),
        (GOOD.replace("5", "99999999999", 1), "2147483647"),
        (GOOD.replace("[1]", "[-1]"), ">= 0"),
        (GOOD.replace("[1]", '["a"]'), "hash_ids"),
        (GOOD.replace('p": 1', 'p": NaN'), "malformed"),
        (GOOD.replace('p": 1', 'p": -1'), ">= 0"),
        (GOOD.replace('p": 1', 'p": 1e999'), "out of range"),
        ("\udcff", "malformed"),  # not UTF-8
    ],
)
def test_bad_mooncake_lines_are_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(f"{GOOD}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(BenchError, match=rf"(?i)bad\.jsonl:3: .*{reason}.*A line of a Mooncake trace"):
        read_mooncake(path)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2023-11-16 18:15:46,5", "fewer columns"),
        ("2023-11-16 18:15:46,five,5", "'five' is no number of tokens"),
        ("2023-11-16 18:15:46,5,-5", "-5 is no number of tokens"),
        ("2023-11-16 18:15:46,5,99999999999", "99999999999 is no number of tokens"),
        ("2023-11-16 18:15:46,5,2.5", "'2.5' is no number of tokens"),
        ("yesterday,5,5", "'yesterday' is no timestamp"),
        ("nan,5,5", "'nan' is no timestamp"),
        (",5,5", "'' is no timestamp"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, reason: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,1\n{row}\n")
    with pytest.raises(BenchError, match=rf"bad\.csv:3: {reason}"):
        read_lengths(path)


def test_files_without_requests(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for reader in (read_mooncake, read_lengths):
        for missing in (path / "nowhere", tmp_path):
            with pytest.raises(BenchError, match="cannot read"):
                reader(missing)
    path.write_text("\n")
    with pytest.raises(BenchError, match="holds no request"):
        read_mooncake(path)
    with pytest.raises(BenchError, match=r"no columns of lengths.*contexttokens"):
        read_lengths(path)
    path.write_text("Timestamp,Prompt\n1,2\n")
    with pytest.raises(BenchError, match="the header is 'timestamp,prompt'"):
        read_lengths(path)
    path.write_text("Timestamp,Request tokens,Response tokens\n1,200,0\n2,300,0\n")
    with pytest.raises(BenchError, match=r"no request \(2 rows"):
        read_lengths(path)
    path.write_bytes(b"Timestamp,Request tokens,Response tokens\n\xff,1,1\n")
    with pytest.raises(BenchError, match=r"cannot read .* as CSV"):
        read_lengths(path)


# Registry


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_workload_makes_prompts_without_data_of_the_user(name: str, words: TokenWords) -> None:
    kind = kind_of(name)
    made = list(islice(workload(WorkloadConfig(name=name), SEED, words), 3))
    assert len(made) == 3
    for conversation in made:
        assert kind.timed <= (conversation.at is not None)
        for turn in conversation.turns:
            assert words.count(words.render(turn.text)) > 0


def test_an_unknown_workload_lists_the_known() -> None:
    with pytest.raises(BenchError, match=r"no workload 'sonett'; there are random, .*sonnet.*lengths"):
        workload(WorkloadConfig(name="sonett"), SEED, None)


def test_named_data_come_before_the_sample(tmp_path: Path) -> None:
    config = write_trace(tmp_path / "t.jsonl", (0, 77, [5]))
    [only] = workload(WorkloadConfig(name="mooncake", data=config.data), SEED, None)
    assert only.turns[0].text == [Synthetic((SEED, 5), 77)]
