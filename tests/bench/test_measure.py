"""Statistics, objectives, summaries and ratios: right where the answer is known."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import pytest
import typer

from bench.config import LoadConfig
from bench.errors import BenchError
from bench.measure.experiment import Experiment, Ratio, Run, Search
from bench.measure.ratios import ratios
from bench.measure.record import LagSamples, Record, RunResult
from bench.measure.slo import NAMES, parse_slo
from bench.measure.statistics import Sample, distribution, resampled, wilson
from bench.measure.summary import measured_seconds, summarise
from bench.measure.summary_format import Distribution, Summary

DOCS = (Path(__file__).parents[2] / "docs" / "bench.md").read_text()
CONFIG = LoadConfig(url="http://127.0.0.1:1")


def answered(id: int = 0, sent: float = 0.0, ttft: float = 0.1, gaps: list[float] | None = None, **more: Any) -> Record:
    """A completed request whose every message has one token, and whose end comes with the last."""
    chunks = np.cumsum([ttft, *([0.02] * 4 if gaps is None else gaps)]).tolist()
    given = {"end": sent + chunks[-1], "completion_tokens": len(chunks), "scheduled": sent} | more
    return Record(id=id, sent=sent, chunks=chunks, **given)


def failed(id: int, error: str, sent: float = 0.0, seconds: float = 0.5, **more: Any) -> Record:
    return Record(id=id, sent=sent, end=sent + seconds, error=error, **more)


def result(records: list[Record], **more: Any) -> RunResult:
    return RunResult(started_at=0.0, wall_seconds=1.0, records=records, **{"lag": LagSamples()} | more)


# Statistics


def test_weighted_quantiles_are_those_of_repeated_requests() -> None:
    rng = np.random.default_rng(1)
    at = [0, 0.25, 0.5, 0.9, 0.95, 0.99, 1]
    for _ in range(50):
        requests = [rng.exponential(size=rng.integers(0, 5)) for _ in range(rng.integers(1, 12))]
        sample = Sample(requests)
        weights = resampled(len(requests), rng)
        repeated = np.concatenate([np.tile(values, times) for values, times in zip(requests, weights, strict=True)])
        if not len(repeated):
            assert np.isnan(sample.quantiles(at, weights)).all() and np.isnan(sample.mean(weights))
            continue
        np.testing.assert_allclose(sample.quantiles(at, weights), np.percentile(repeated, np.multiply(at, 100)))
        assert sample.mean(weights) == pytest.approx(repeated.mean())


def test_weights_of_one_change_nothing() -> None:
    sample = Sample([[3.0, 1.0], [2.0], [10.0, 4.0, 4.0]])
    at = [0.1, 0.5, 0.9, 0.99]
    expected = np.percentile([3, 1, 2, 10, 4, 4], [10, 50, 90, 99])
    np.testing.assert_allclose(sample.quantiles(at), expected)
    np.testing.assert_allclose(sample.quantiles(at, np.ones(3, np.int64)), expected)


def test_distribution_in_milliseconds() -> None:
    found = distribution([[0.001 * k] for k in range(101)])
    assert (found.count, found.mean, found.p50, found.p90, found.p95, found.p99, found.max) == pytest.approx(
        (101, 50, 50, 90, 95, 99, 100)
    )
    assert set(found.ci95) == {"mean", "p50", "p90", "p95", "p99"}
    low, high = found.ci95["p50"]
    assert low < 50 < high
    assert found == distribution([[0.001 * k] for k in range(101)]), "the same seed gives the same interval"


def test_distribution_of_nothing() -> None:
    assert distribution([]) == distribution([[], []]) == Distribution()


@pytest.mark.parametrize("gaps", [1, 20])
def test_intervals_cover_the_truth(gaps: int) -> None:
    """Gaps of a request share its speed. Of 95 % intervals about 95 % hold what they should, whatever the gaps."""
    rng = np.random.default_rng(7)
    between, within = 0.5, 0.3
    spread = np.hypot(between, within)
    truth = {"mean": np.exp(spread**2 / 2), "p50": 1.0, "p90": np.exp(1.2815515655 * spread)}
    trials, hits, naive_hits = 150, dict.fromkeys(truth, 0), 0
    for seed in range(trials):
        requests = np.exp(rng.normal(0, between, (80, 1)) + rng.normal(0, within, (80, gaps)))
        found = distribution(list(requests), seed, resamples=200, scale=1.0)
        for name, value in truth.items():
            low, high = found.ci95[name]
            hits[name] += low <= value <= high
        naive = distribution(requests.reshape(-1, 1).tolist(), seed, resamples=200, scale=1.0).ci95["p50"]
        naive_hits += naive[0] <= 1 <= naive[1]
    shares = {name: number / trials for name, number in hits.items()}
    assert all(0.87 <= share <= 0.995 for share in shares.values()), shares
    assert (naive_hits / trials < 0.7) == (gaps > 1), "were gaps drawn one by one, intervals would claim too much"


def test_wilson_intervals() -> None:
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)  # known values
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


# Objectives


def test_objectives_are_read() -> None:
    slo = parse_slo(" ttft=0.2s, tpot=10ms,itl_p99=20000us ,e2e=2s")
    assert slo.text == "ttft=0.2s, tpot=10ms,itl_p99=20000us ,e2e=2s"
    assert {limit.name: limit.ms for limit in slo.limits} == {"ttft": 200, "tpot": 10, "itl_p99": 20, "e2e": 2000}
    assert {limit.name for name in NAMES for limit in parse_slo(f"{name}=1s").limits} == set(NAMES)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=200", "ttft=-1ms", "ttft=0ms", "ttft<2s", "p99=2s", "ttft=1s,ttft=2s"]
)
def test_bad_objectives_teach_the_form(text: str) -> None:
    with pytest.raises(BenchError, match="ttft=200ms,tpot=10ms,itl_p99=20ms,e2e=2s"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft=101ms", True),
        ("ttft=99ms", False),
        ("tpot=31ms", True),  # (0.01 + 0.01 + 0.01 + 0.09) / 4
        ("tpot=29ms", False),
        ("e2e=221ms", True),
        ("e2e=219ms", False),
        ("itl_p50=11ms", True),
        ("itl_p50=9ms", False),
        ("itl_p90=67ms", True),  # 0.01 + 0.7 * 0.08 = 0.066
        ("itl_p90=65ms", False),
        ("itl_p95=77ms", False),  # 0.078
        ("itl_p95=79ms", True),
        ("itl_p99=87ms", False),  # 0.0876
        ("itl_p99=88ms", True),
        ("itl_max=91ms", True),
        ("itl_max=89ms", False),
    ],
)
def test_what_meets_an_objective(slo: str, met: bool) -> None:
    record = answered(gaps=[0.01, 0.01, 0.01, 0.09])
    assert parse_slo(slo).met(record) == {slo.partition("=")[0]: met}


def test_requests_that_lack_a_measure() -> None:
    slo = parse_slo("ttft=1s,tpot=1ms,itl_p99=1ms,e2e=1s")
    assert slo.met(answered(gaps=[])) == {"ttft": True, "tpot": True, "itl_p99": True, "e2e": True}
    silent = Record(id=0, sent=0.0, end=0.1, completion_tokens=1)
    assert slo.met(silent) == {"ttft": False, "tpot": True, "itl_p99": True, "e2e": True}
    assert not any(slo.met(failed(0, "timeout", chunks=[0.01])).values())


# Summaries


def test_summary_of_a_run() -> None:
    records = [
        answered(0, sent=0.0, warmup=True, ttft=50.0),
        answered(1, sent=1.0, ttft=0.1, prompt_tokens=11, input_tokens=10, cached_tokens=4, shared_tokens=8),
        answered(2, sent=2.0, ttft=0.2, input_tokens=10, output_tokens=5),
        answered(3, sent=3.0, ttft=0.3, prompt_tokens=10, input_tokens=10, cached_tokens=0, output_tokens=6),
        failed(4, "http_429", sent=4.0, status=429, retry_after=2.0, detail="busy"),
        failed(5, "http_429", sent=4.0, status=429, detail="still busy"),
        failed(6, "timeout", sent=4.0, seconds=7.0, chunks=[0.1]),
        failed(7, "interrupted", sent=4.0, seconds=9.0, chunks=[0.1]),
        answered(8, sent=20.0, client="slow"),
        failed(9, "accepted", sent=20.0, client="bad"),
        failed(10, "interrupted", sent=20.0, client="bad"),
    ]
    slo = parse_slo("ttft=250ms,tpot=30ms")
    summary = summarise(CONFIG, result(records, interrupted=True), slo)
    assert (summary.requests, summary.completed, summary.unfinished) == (7, 3, 1)
    assert summary.errors == {"http_429": 2, "timeout": 1}
    assert summary.error_examples == {"http_429": "busy", "timeout": ""}
    assert summary.retry_after_s is not None and summary.retry_after_s.p50 == 2.0
    assert summary.measured_s == pytest.approx(10.0)  # from 1.0 to 11.0; what was cut off at 13.0 does not count
    assert summary.throughput.requests_per_s == pytest.approx(0.3)
    assert summary.throughput.output_tokens_per_s == pytest.approx(1.5)
    assert summary.throughput.input_tokens_per_s == pytest.approx(3.1)
    assert summary.throughput.total_tokens_per_s == pytest.approx(4.6)
    assert (summary.ttft_ms.count, summary.ttft_ms.p50) == (3, pytest.approx(200))
    assert (summary.tpot_ms.count, summary.tpot_ms.mean) == (3, pytest.approx(20))
    assert (summary.itl_ms.count, summary.itl_ms.p99) == (12, pytest.approx(20))
    assert (summary.e2e_ms.count, summary.e2e_ms.max) == (3, pytest.approx(380))
    tokens = summary.tokens
    assert (tokens.input, tokens.output, tokens.cached, tokens.predicted_cached) == (31, 15, 4, 8)
    assert (tokens.wrong_input_length, tokens.wrong_output_length) == (1, 1)
    assert summary.goodput is not None
    assert summary.goodput.requests_per_s == pytest.approx(0.2)
    assert summary.goodput.attainment == pytest.approx(2 / 6)
    assert summary.goodput.ci95 == wilson(2, 6)
    assert [(each.name, each.limit_ms, each.attainment) for each in summary.goodput.objectives] == [
        ("ttft", 250, pytest.approx(2 / 6)),
        ("tpot", 30, pytest.approx(3 / 6)),
    ]
    assert {name: (c.sent, c.as_expected, c.unexpected) for name, c in summary.clients.items()} == {
        "slow": (1, 1, {}),
        "bad": (2, 0, {"accepted": 1}),
    }
    assert summary.valid and summary.interrupted
    assert summary.started_at == "1970-01-01T00:00:00.000+00:00"
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary


def test_answers_that_may_end_early_are_wrong_only_when_longer() -> None:
    records = [answered(k, output_tokens=tokens) for k, tokens in enumerate((4, 5, 6))]
    assert summarise(CONFIG, result(records)).tokens.wrong_output_length == 2
    early = msgspec.structs.replace(CONFIG, ignore_eos=False)
    assert summarise(early, result(records)).tokens.wrong_output_length == 1


def test_a_server_that_tells_no_cache() -> None:
    tokens = summarise(CONFIG, result([answered()])).tokens
    assert (tokens.cached, tokens.predicted_cached) == (None, None)


def test_a_late_load_generator_makes_no_valid_run() -> None:
    late = LagSamples(send=[1.0] * 95 + [30.0] * 5, loop=[20.0] * 10)
    summary = summarise(CONFIG, result([answered()], lag=late))
    assert not summary.valid
    assert [reason.split(" is ")[0] for reason in summary.invalid_because] == [
        "the load generator itself was late: send lag p99",
        "the load generator itself was late: loop lag p99",
    ]
    assert summary.send_lag_ms.p99 == pytest.approx(30.0)
    tolerant = msgspec.structs.replace(CONFIG, max_send_lag_ms=31.0)
    assert summarise(tolerant, result([answered()], lag=late)).valid


@pytest.mark.parametrize("records", [[], [failed(0, "connection_refused")], [answered(warmup=True)]])
def test_a_run_without_answers_is_not_valid(records: list[Record]) -> None:
    summary = summarise(CONFIG, result(records), parse_slo("ttft=1s"))
    assert summary.invalid_because == ["no request was completed"]
    assert summary.ttft_ms == Distribution()
    assert summary.goodput is not None and summary.goodput.attainment == 0
    assert summary.throughput.requests_per_s == 0


# Ratios


def runs(records: list[list[Record]]) -> list[Run]:
    """Runs whose summaries have nothing but the time; intervals of all latencies would take long."""
    empty = summarise(CONFIG, result([]))
    return [
        Run(
            label="",
            config=CONFIG,
            result=result(each),
            summary=msgspec.structs.replace(empty, measured_s=measured_seconds(each)),
        )
        for each in records
    ]


def noisy_round(rng: np.random.Generator, ttft: float = 0.1, slower: float = 1.0, count: int = 40) -> list[Record]:
    drift = slower * rng.lognormal(0, 0.2)
    return [
        answered(k, sent=0.1 * k, ttft=ttft * slower * rng.lognormal(0, 0.3), gaps=(drift * rng.lognormal(-4, 0.1, 9)))
        for k in range(count)
    ]


def stretched(records: list[Record], factor: float) -> list[Record]:
    return [
        msgspec.structs.replace(
            record,
            sent=factor * record.sent,
            end=factor * record.end,
            chunks=[factor * at for at in record.chunks],
        )
        for record in records
    ]


def test_a_target_that_is_slower_by_a_factor() -> None:
    """Drift of the rounds and luck of the requests are the same on both sides, so the ratio is exact."""
    rng = np.random.default_rng(3)
    base = [noisy_round(rng) for _ in range(3)]
    found = ratios(runs(base), runs([stretched(records, 1.5) for records in base]), "other")
    by_name = {ratio.metric: ratio for ratio in found}
    latencies = [f"{name}_ms {p}" for name in ("ttft", "tpot", "itl", "e2e") for p in ("p50", "p90", "p99")]
    assert list(by_name) == [*latencies, "throughput requests_per_s", "throughput output_tokens_per_s"]
    for name, ratio in by_name.items():
        expected = pytest.approx(1 / 1.5 if name.startswith("throughput") else 1.5)
        assert ratio.target == "other"
        assert (ratio.ratio, *ratio.ci95) == (expected, expected, expected)
        assert ratio.value / ratio.base == expected
    pooled = np.concatenate([[record.ttft for record in records] for records in base])
    assert by_name["ttft_ms p90"].base == pytest.approx(1e3 * np.percentile(pooled, 90))


def test_ratio_intervals_cover_the_truth() -> None:
    rng = np.random.default_rng(5)
    trials, hits = 30, 0
    for seed in range(trials):
        base = runs([noisy_round(rng, count=30) for _ in range(3)])
        other = runs([noisy_round(rng, slower=1.3, count=30) for _ in range(3)])
        low, high = next(
            ratio.ci95 for ratio in ratios(base, other, "b", seed, resamples=150) if ratio.metric == "ttft_ms p50"
        )
        hits += low <= 1.3 <= high
    assert hits >= 0.85 * trials


def test_rounds_and_requests_that_one_side_lacks() -> None:
    rng = np.random.default_rng(9)
    whole = noisy_round(rng)
    broken = [failed(record.id, "timeout") if record.id % 2 else record for record in stretched(whole, 2.0)]
    found = {r.metric: r for r in ratios(runs([whole, whole]), runs([broken]), "b")}
    assert found["ttft_ms p50"].base == pytest.approx(1e3 * np.median([record.ttft for record in whole]))
    assert found["ttft_ms p50"].value == pytest.approx(1e3 * np.median([record.ttft for record in broken[::2]]))
    low, high = found["throughput requests_per_s"].ci95
    assert low < found["throughput requests_per_s"].ratio < high
    assert ratios(runs([whole]), [], "b") == []
    only_throughput = ratios(runs([whole]), runs([[failed(0, "timeout")]]), "b")
    assert {ratio.metric: ratio.ratio for ratio in only_throughput} == {
        "throughput requests_per_s": 0,
        "throughput output_tokens_per_s": 0,
    }


# Documentation


def structs_in(kind: Any) -> set[type]:
    """The struct and all that its fields hold."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return set().union(*(structs_in(part) for part in get_args(kind)))
    return {kind}.union(*(structs_in(hint) for hint in get_type_hints(kind).values()))


def documented(name: str) -> bool:
    return re.search(rf"`(?:[\w.\[\]]+\.)?{name}`", DOCS) is not None


@pytest.mark.parametrize(
    "struct", sorted(structs_in(Summary) | {Record, Ratio, Search, Run, Experiment}, key=lambda struct: struct.__name__)
)
def test_every_field_is_documented(struct: type[msgspec.Struct]) -> None:
    in_memory = {"result", "summary"} if struct is Run else set()  # the JSON has the summary's fields themselves
    missing = [name for name in struct.__struct_fields__ if name not in in_memory and not documented(name)]
    assert not missing


def test_every_flag_is_documented() -> None:
    from bench.cli import app

    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    flags = {flag for command in group.commands.values() for option in command.params for flag in option.opts}
    flags = {flag for flag in flags if flag.startswith("--") and flag != "--help"}
    missing = sorted(flag for flag in flags if not re.search(rf"`{flag}[` ]", DOCS))
    assert not missing
    assert {f"`tandem bench {name}`" for name in group.commands} <= set(re.findall(r"`tandem bench \w+`", DOCS))


def test_every_objective_is_documented() -> None:
    assert all(documented(name) for name in NAMES)


def test_few_rounds_prove_little() -> None:
    """The same server twice: rounds that differ by a hundredth either way must not exclude 1."""

    def rounds(lengths: list[float]) -> list[Run]:
        runs = []
        for seconds in lengths:
            records = [answered(i, sent=i * seconds / 20) for i in range(20)]
            summary = summarise(CONFIG, result(records))
            runs.append(Run(label="", config=CONFIG, result=result(records), summary=summary))
        return runs

    found = {each.metric: each for each in ratios(rounds([10.0, 10.0, 10.0]), rounds([9.9, 9.8, 10.05]), "b")}
    low, high = found["throughput requests_per_s"].ci95
    assert low < 1 < high and found["throughput requests_per_s"].ratio > 1
