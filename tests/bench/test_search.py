"""Ladders, the search for goodput and the order of comparisons, over a server that is a function of its rate."""

import asyncio
import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.compare import compare_targets, turns
from bench.config import LoadConfig
from bench.errors import BenchError
from bench.goodput import Bracket, find_goodput, offered
from bench.measure.experiment import Experiment, Run
from bench.measure.record import LagSamples, Record, RunResult
from bench.measure.slo import parse_slo
from bench.measure.summary import summarise
from bench.measure.summary_format import Distribution, Goodput, Summary, Throughput
from bench.sweep import auto_ladder, parse_ladder, sweep_loads
from bench.targets import Target

CONFIG = LoadConfig(url="http://127.0.0.1:1", model="m", num_requests=100, seed=7)
REQUESTS = 1000
NOTHING = Distribution()


class Server:
    """Attainment is a function of the rate; 0 asks for that of requests one at a time."""

    def __init__(self, attainment: Callable[[float], float], send_rate: float = math.inf, stop_at: int = 0) -> None:
        """`send_rate`: what the load generator can do. `stop_at`: number of the run in which Ctrl-C comes."""
        self.asked: list[LoadConfig] = []
        self.stop = asyncio.Event()
        self._attainment = attainment
        self._send_rate = send_rate
        self._stop_at = stop_at

    async def probe(self, config: LoadConfig, label: str) -> Run:
        self.asked.append(config)
        if len(self.asked) == self._stop_at:
            self.stop.set()
        rate = config.rate or 0.0
        met = round(REQUESTS * self._attainment(rate))
        gap = max(1 / rate, 1 / self._send_rate) if rate else 0.0
        records = [Record(id=i, scheduled=i / rate if rate else 0.0, sent=i * gap) for i in range(11)]
        summary = Summary(
            config=config,
            interrupted=self.stop.is_set(),
            requests=REQUESTS,
            completed=REQUESTS,
            ttft_ms=NOTHING,
            tpot_ms=NOTHING,
            itl_ms=NOTHING,
            e2e_ms=NOTHING,
            throughput=Throughput(requests_per_s=rate),
            tokens=summarise(config, result([])).tokens,
            goodput=Goodput(
                slo="ttft=1s",
                requests_per_s=rate * met / REQUESTS,
                attainment=met / REQUESTS,
                ci95=(0, 1),
                objectives=[],
            ),
            send_lag_ms=NOTHING,
            loop_lag_ms=NOTHING,
        )
        return Run(label=label, config=config, result=result(records), summary=summary)

    def asked_rates(self) -> list[float | None]:
        return [config.rate for config in self.asked]


def result(records: list[Record]) -> RunResult:
    return RunResult(started_at=0.0, wall_seconds=1.0, records=records, lag=LagSamples())


def up_to(limit: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= limit else 0.5


# Goodput


async def test_goodput_is_found() -> None:
    server = Server(lambda rate: min(1.0, 1.9 - rate / 10))  # 90 % at 10
    experiment = await find_goodput(CONFIG, server.probe, tolerance=0.05)
    search = experiment.search
    assert search is not None and search.failed_rate is not None
    assert search.attainment == 0.9 and search.rate <= 10 < search.failed_rate <= 1.05 * search.rate
    best = next(run for run in experiment.runs if run.load == search.rate)
    assert best.summary.goodput is not None and search.goodput == best.summary.goodput.requests_per_s > 0
    loads = [run.load for run in experiment.runs]
    assert server.asked_rates() == [1, 2, 4, 8, 16, 12, 10, 11, 10.5] and loads == sorted(server.asked_rates())
    assert experiment.kind == "goodput" and not experiment.stopped_because
    assert "90 %" in experiment.title and "ttft=1s" in experiment.title


async def test_each_probe_has_a_seed_of_its_own() -> None:
    server = Server(up_to(3))
    await find_goodput(CONFIG, server.probe)
    assert [config.seed for config in server.asked] == list(range(7, 7 + len(server.asked)))


async def test_a_start_too_high_is_halved() -> None:
    server = Server(up_to(3))
    experiment = await find_goodput(CONFIG, server.probe, start=20, tolerance=0.5)
    assert server.asked_rates() == [20, None, 10, 5, 2.5, 3.75]
    assert server.asked[1].concurrency == 1 and all(config.concurrency != 1 for config in server.asked[2:])
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (2.5, 3.75)
    assert [run.load for run in experiment.runs] == [2.5, 3.75, 5, 10, 20]


async def test_where_one_at_a_time_fails_no_rate_can_hold() -> None:
    server = Server(lambda rate: 0.4)
    experiment = await find_goodput(CONFIG, server.probe, start=2)
    assert server.asked_rates() == [2, None]
    search = experiment.search
    assert search is not None and (search.rate, search.failed_rate, search.goodput) == (0, 2, 0)
    assert "one at a time, 40.0% of" in experiment.stopped_because


async def test_where_nothing_but_one_at_a_time_holds_the_search_ends() -> None:
    server = Server(lambda rate: 1.0 if rate == 0 else 0.0)
    experiment = await find_goodput(CONFIG, server.probe, max_probes=5)
    search = experiment.search
    assert len(server.asked) == 5
    assert search is not None and (search.rate, search.failed_rate, search.goodput) == (0, 0.125, 0)
    assert "no rate held" in experiment.stopped_because


async def test_where_everything_holds_no_rate_failed() -> None:
    experiment = await find_goodput(CONFIG, Server(lambda rate: 1.0).probe, max_probes=4)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (8, None)
    assert "no rate failed" in experiment.stopped_because


async def test_too_few_probes_say_how_far_they_came() -> None:
    experiment = await find_goodput(CONFIG, Server(up_to(3)).probe, max_probes=4)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (3, 4)
    assert "after 4 runs the rate is known to 33.3%" in experiment.stopped_because


async def test_a_load_generator_that_lags_is_not_believed() -> None:
    experiment = await find_goodput(CONFIG, Server(up_to(1000), send_rate=13).probe)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (8, None)
    assert re.search(r"at 16 req/s: the load generator sent only 81% of that rate", experiment.stopped_because)


async def test_a_run_that_is_not_valid_is_not_believed() -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        assert config.rate is not None
        lag = LagSamples(send=[50.0 if config.rate > 2 else 0.1] * 10)
        return summarised(config, label, lag=lag)

    experiment = await find_goodput(CONFIG, probe)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (2, None)
    assert "at 4 req/s: the load generator itself was late: send lag p99 is 50 ms" in experiment.stopped_because
    assert [run.load for run in experiment.runs] == [1, 2, 4]


async def test_where_no_request_is_completed_the_server_failed() -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        return summarised(config, label, error="http_503" if (config.rate or 0) > 2 else "")

    experiment = await find_goodput(CONFIG, probe, tolerance=0.6)
    assert experiment.search is not None and not experiment.stopped_because
    assert (experiment.search.rate, experiment.search.failed_rate) == (2, 3)


async def test_where_no_request_is_completed_by_a_late_generator_nothing_is_known() -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        return summarised(config, label, error="timeout", lag=LagSamples(loop=[99.0] * 10))

    experiment = await find_goodput(CONFIG, probe)
    assert experiment.search is not None and experiment.search.failed_rate is None
    assert "loop lag p99 is 99 ms" in experiment.stopped_because


async def test_a_burst_too_short_for_the_load_to_build_up_is_not_believed() -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        return summarised(config, label)  # 20 requests that take 0.1 s each

    experiment = await find_goodput(CONFIG, probe, start=16)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (64, None)
    assert "at 128 req/s: all was sent within 0.15 s, but an answer takes 0.1 s" in experiment.stopped_because


async def test_a_run_without_requests_is_not_believed() -> None:
    async def probe(config: LoadConfig, label: str) -> Run:
        return summarised(config, label, requests=0)

    experiment = await find_goodput(CONFIG, probe)
    assert experiment.search is not None and experiment.search.failed_rate is None
    assert "no request was counted" in experiment.stopped_because


async def test_a_server_that_is_gone_ends_the_search() -> None:
    server = Server(up_to(100))

    async def probe(config: LoadConfig, label: str) -> Run:
        if config.rate == 8:
            raise BenchError("it does not answer")
        return await server.probe(config, label)

    experiment = await find_goodput(CONFIG, probe)
    assert experiment.search is not None and experiment.search.rate == 4
    assert experiment.stopped_because == "it does not answer"
    with pytest.raises(BenchError, match="it does not answer"):
        await find_goodput(CONFIG, probe, start=8)


async def test_ctrl_c_ends_the_search_and_judges_no_part_of_a_run() -> None:
    server = Server(up_to(3), stop_at=3)
    experiment = await find_goodput(CONFIG, server.probe, stop=server.stop)
    assert experiment.search is not None
    assert (experiment.search.rate, experiment.search.failed_rate) == (2, None)
    assert experiment.stopped_because == "interrupted" and len(experiment.runs) == 3


async def test_what_cannot_be_searched_is_refused() -> None:
    async def without_slo(config: LoadConfig, label: str) -> Run:
        return summarised(config, label, slo="")

    with pytest.raises(BenchError, match="above 0"):
        await find_goodput(CONFIG, Server(up_to(1)).probe, start=0)
    with pytest.raises(BenchError, match="ramp"):
        ramp = LoadConfig(url="u", arrival="ramp", ramp_to=3)
        await find_goodput(ramp, Server(up_to(1)).probe)
    with pytest.raises(BenchError, match="--slo ttft"):
        await find_goodput(CONFIG, without_slo)


async def test_a_trace_comes_at_the_asked_rate() -> None:
    server = Server(up_to(3))
    await find_goodput(LoadConfig(url="u", arrival="trace"), server.probe)
    assert {config.arrival for config in server.asked} == {"poisson"}


def summarised(
    config: LoadConfig,
    label: str,
    error: str = "",
    requests: int = 20,
    lag: LagSamples | None = None,
    slo: str = "ttft=1s",
) -> Run:
    rate = config.rate or 1.0
    records = [
        Record(id=i, scheduled=i / rate, sent=i / rate, end=i / rate + 0.1, chunks=[0.05], error=error)
        for i in range(requests)
    ]
    found = RunResult(started_at=0.0, wall_seconds=1.0, records=records, lag=lag or LagSamples())
    return Run(
        label=label,
        config=config,
        result=found,
        summary=summarise(config, found, parse_slo(slo) if slo else None),
    )


rates = st.floats(0.01, 1000)


@given(limit=rates, start=rates, tolerance=st.floats(0.001, 1))
def test_a_bracket_closes_around_the_limit(limit: float, start: float, tolerance: float) -> None:
    bracket = Bracket(start, tolerance)
    tried: list[float] = []
    while (rate := bracket.next_rate()) is not None:
        assert bracket.held < rate and (bracket.failed is None or rate < bracket.failed)
        tried.append(rate)
        bracket.add(rate, rate <= limit)
        assert bracket.held <= limit and (bracket.failed is None or bracket.failed > limit)
    assert bracket.failed is not None and bracket.held > 0
    assert bracket.failed - bracket.held <= tolerance * bracket.held
    doublings = abs(math.log2(limit / start)) + 2
    assert len(tried) <= doublings + math.log2(1 / tolerance) + 2


@settings(max_examples=30, deadline=None)
@given(
    alone=st.floats(0.5, 1),
    slope=st.floats(0.001, 2),
    start=st.floats(0.1, 50),
    attainment=st.floats(0.5, 1),
    probes=st.integers(1, 12),
)
def test_what_is_reported_was_measured(
    alone: float, slope: float, start: float, attainment: float, probes: int
) -> None:
    server = Server(lambda rate: max(0.0, alone - slope * rate / 100))
    experiment = asyncio.run(find_goodput(CONFIG, server.probe, attainment=attainment, start=start, max_probes=probes))
    search = experiment.search
    assert search is not None and len(server.asked) <= probes
    shares = {run.load: run.summary.goodput.attainment for run in experiment.runs if run.summary.goodput}
    assert search.rate == max((load for load, share in shares.items() if share >= attainment and load), default=0)
    assert search.failed_rate == min((load for load, share in shares.items() if share < attainment), default=None)
    width = (search.failed_rate or math.inf) - search.rate
    assert experiment.stopped_because or width <= 0.05 * search.rate


@pytest.mark.parametrize(
    ("due", "sent", "share"),
    [
        ([], [], 1.0),
        ([0.5], [9.0], 1.0),
        ([0, 1, 2], [0, 1, 2], 1.0),
        ([0, 1, 2], [0.5, 1, 2], 1.0),
        ([0, 1, 2], [1, 2, 3], 1.0),
        ([0, 1, 2], [0, 2, 4], 0.5),
        ([0, 0, 0], [0, 1, 2], 1.0),
    ],
)
def test_the_share_that_was_offered(due: list[float], sent: list[float], share: float) -> None:
    later_turn = Record(id=99, turn=1, scheduled=0.0, sent=100.0)
    records = [Record(id=i, scheduled=d, sent=s) for i, (d, s) in enumerate(zip(due, sent, strict=True))]
    assert offered([*records, later_turn]) == share


# Ladders


@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ("4", [4]),
        ("1,2, 4,8", [1, 2, 4, 8]),
        ("8,.5", [8, 0.5]),
        ("1-16x2", [1, 2, 4, 8, 16]),
        ("1 - 10 x 2", [1, 2, 4, 8]),
        ("0.5-8x2", [0.5, 1, 2, 4, 8]),
        ("1-5x1.5", [1, 1.5, 2.25, 3.375]),
        ("1-8+1", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("0.1-0.5+0.1", [0.1, 0.2, 0.3, 0.4, 0.5]),
        ("3-3x2", [3]),
    ],
)
def test_ladders_are_read(text: str, loads: list[float]) -> None:
    assert parse_ladder(text) == loads


@pytest.mark.parametrize(
    "text",
    ["", "a", "1,,2", "0,1", "-1", "1,inf", "nan", "1-16", "4-1x2", "0-8x2", "1-8x1", "1-8+0", "1-1000+1", "1-8*2"],
)
def test_what_is_no_ladder_is_explained(text: str) -> None:
    with pytest.raises(BenchError, match=re.escape("write 1,2,4 or 1-16x2")) as error:
        parse_ladder(text)
    assert repr(text) in str(error.value)


@given(start=st.integers(1, 50), steps=st.integers(0, 40), by=st.integers(1, 9))
def test_an_arithmetic_ladder_ends_where_it_says(start: int, steps: int, by: int) -> None:
    tenths = [(start + step * by) / 10 for step in range(steps + 1)]
    assert parse_ladder(f"{start / 10}-{tenths[-1]}+{by / 10}") == tenths


async def swept(loads: list[float], axis: str = "rate", **more: int) -> tuple[Server, Experiment]:
    server = Server(up_to(3), **more)
    return server, await sweep_loads(CONFIG, loads, axis, server.probe, server.stop)


async def test_a_sweep_makes_one_run_for_each_load() -> None:
    server, experiment = await swept([4, 1, 0.5])
    assert server.asked_rates() == [4, 1, 0.5] and [config.seed for config in server.asked] == [7, 8, 9]
    assert [run.load for run in experiment.runs] == [0.5, 1, 4]
    assert [run.label for run in experiment.runs] == ["0.5 req/s", "1 req/s", "4 req/s"]
    assert (experiment.kind, experiment.axis, experiment.stopped_because) == ("sweep", "rate", "")


async def test_a_sweep_of_concurrency_is_a_closed_loop() -> None:
    server, experiment = await swept([1, 8], "concurrency")
    assert [config.concurrency for config in server.asked] == [1, 8] and server.asked_rates() == [None, None]
    assert experiment.axis == "concurrency" and experiment.runs[1].label == "8 at once"
    with pytest.raises(BenchError, match=r"1\.5 is no whole number"):
        await swept([1, 1.5], "concurrency")


async def test_ctrl_c_ends_a_sweep_and_keeps_what_there_is() -> None:
    server, experiment = await swept([1, 2, 3, 4], stop_at=2)
    assert len(server.asked) == 2 and [run.load for run in experiment.runs] == [1, 2]
    assert experiment.stopped_because == "interrupted"


async def test_a_server_that_is_gone_ends_a_sweep() -> None:
    server = Server(up_to(3))

    async def probe(config: LoadConfig, label: str) -> Run:
        if config.rate == 2:
            raise BenchError("it does not answer")
        return await server.probe(config, label)

    experiment = await sweep_loads(CONFIG, [1, 2, 3], "rate", probe)
    assert [run.load for run in experiment.runs] == [1] and experiment.stopped_because == "it does not answer"
    with pytest.raises(BenchError, match="it does not answer"):
        await sweep_loads(CONFIG, [2, 3], "rate", probe)


async def test_a_ladder_of_its_own_leads_up_to_the_highest_rate() -> None:
    asked: list[LoadConfig] = []

    async def probe(config: LoadConfig, label: str) -> Run:
        asked.append(config)
        # 40 requests of 20 conversations, all done after 10 s: two conversations a second.
        records = [
            Record(id=i, conversation=i // 2, turn=i % 2, sent=0.0, end=i / 39 * 10, chunks=[0.0]) for i in range(40)
        ]
        return Run(label=label, config=config, result=result(records), summary=summarise(config, result(records)))

    assert await auto_ladder(CONFIG, 4, probe) == [0.2, 0.8, 1.4, 2.0]
    assert asked[0].concurrency == 64 and asked[0].rate is None and asked[0].seed != CONFIG.seed
    assert asked[0].seed not in {CONFIG.seed + step for step in range(4)}  # which the ladder's steps will have
    assert asked[0].num_requests == 256 > CONFIG.num_requests


async def test_no_ladder_without_answers() -> None:
    async def failing(config: LoadConfig, label: str) -> Run:
        return summarised(config, label, error="http_503")

    with pytest.raises(BenchError, match=r"20 http_503.*--rate"):
        await auto_ladder(CONFIG, 4, failing)
    server = Server(up_to(3), stop_at=1)
    with pytest.raises(BenchError, match="interrupted"):
        await auto_ladder(CONFIG, 4, server.probe)


# Comparisons


def targets(*names: str) -> list[Target]:
    return [Target(name=name, url=f"http://{name}") for name in names]


@pytest.mark.parametrize("number", [2, 3, 4])
def test_every_target_has_every_place_equally_often(number: int) -> None:
    given_targets = targets(*"abcd"[:number])
    rounds = [turns(given_targets, round) for round in range(2 * number)]
    for place in range(number):
        assert sorted(order[place].name for order in rounds) == sorted(2 * "abcd"[:number])
    assert all(later == earlier[::-1] for earlier, later in zip(rounds[::2], rounds[1::2], strict=True))


async def test_a_round_asks_all_targets_the_same() -> None:
    asked: list[tuple[str, int]] = []

    async def probe(config: LoadConfig, label: str) -> Run:
        asked.append((config.url, config.seed))
        slower = 2 if config.url == "http://b" else 1
        records = [
            Record(id=i, sent=i / 10, end=i / 10 + slower, chunks=[0.1 * slower, 0.2 * slower], completion_tokens=2)
            for i in range(20)
        ]
        return Run(label=label, config=config, result=result(records), summary=summarise(config, result(records)))

    experiment = await compare_targets(CONFIG, targets("a", "b"), 3, False, probe)
    a, b = "http://a", "http://b"
    assert asked == [(a, 7), (b, 7), (b, 8), (a, 8), (b, 9), (a, 9)]
    assert [run.target for run in experiment.runs] == ["a", "b", "b", "a", "b", "a"]
    assert experiment.runs[2].label == "b, round 2" and not experiment.stopped_because
    found = {ratio.metric: ratio for ratio in experiment.ratios}
    assert {ratio.target for ratio in experiment.ratios} == {"b"}
    assert found["ttft_ms p50"].ratio == pytest.approx(2) and found["ttft_ms p50"].base == pytest.approx(100)


async def test_ctrl_c_keeps_whole_rounds_for_the_ratios() -> None:
    stop = asyncio.Event()
    done: list[str] = []

    async def probe(config: LoadConfig, label: str) -> Run:
        done.append(label)
        run = summarised(config, label)
        if len(done) == 4:
            stop.set()
            run.summary.interrupted = True
            run.result.records = run.result.records[:1]
            run.result.records[0].chunks = [99.0]
        return run

    experiment = await compare_targets(CONFIG, targets("a", "b"), 3, False, probe, stop)
    assert done == ["a, round 1", "b, round 1", "b, round 2", "a, round 2"]
    assert len(experiment.runs) == 4 and experiment.stopped_because == "interrupted"
    found = {ratio.metric: ratio for ratio in experiment.ratios}
    assert found["ttft_ms p99"].ratio == pytest.approx(1)


async def test_what_cannot_be_compared_is_refused() -> None:
    server = Server(up_to(1))
    with pytest.raises(BenchError, match="two targets or more"):
        await compare_targets(CONFIG, targets("a"), 1, False, server.probe)
    with pytest.raises(BenchError, match="two targets are called a"):
        await compare_targets(CONFIG, targets("a", "b", "a"), 1, False, server.probe)
    assert not server.asked
