"""What `bench.simulator_check` makes of requests that were measured: here they are a simulation's own."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.config import LoadConfig, WorkloadConfig
from bench.measure.record import RunResult
from bench.replay.planned import planned_trace
from bench.replay.simulated import simulated
from bench.simulator_check import ENGINES, Live, Row, compared, settings_of
from planner.fitting import Profile
from planner.simulator.timing import Timing


def measured(timing: Timing) -> Live:
    """As if a cluster were as fast as `timing` says."""
    profile = Profile(timing)
    live = Live(name="1P1D", prefill=1, workers=2, engine=ENGINES["cpu"], machine="", up=[], profile=profile)
    for seed, rate in enumerate((2.0, 4.0)):
        workload = WorkloadConfig(input_len="64-400", output_len="16-64")
        config = LoadConfig(url="", workload=workload, rate=rate, duration=20.0, warmup=4, seed=seed)
        run = simulated(
            planned_trace(config), config, settings_of(live, profile), policy="prefix", slo=None, label="", console=None
        )
        live.runs.append(msgspec.structs.replace(run, config=config, load=rate))
    return live


def test_a_cluster_as_the_profile_says_is_met_to_the_last_digit_and_a_slower_one_is_not(tmp_path: Path) -> None:
    timing = Timing(step=0.02, prompt_token=4e-4, sequence=2e-3)
    live = measured(timing)
    rows = compared(live, None)
    assert [row.rate for row in rows] == [2.0, 4.0] and all(row.holds for row in rows)
    assert {ratio for row in rows for ratio in row.ratios.values()} == {1.0}
    slower = msgspec.structs.replace(live, profile=Profile(msgspec.structs.replace(timing, prompt_token=8e-4)))
    for row in compared(slower, None):
        assert row.ratios["ttft_p50"] > 1.5 and not row.holds
    file, report = tmp_path / "live.json", tmp_path / "report.json"
    file.write_bytes(msgspec.json.encode(live))
    command = [sys.executable, "-m", "bench.simulator_check", "compare", str(file), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes") == 2
    (deployment,) = msgspec.json.decode(report.read_bytes())["deployments"]
    assert [rate["holds"] for rate in deployment["rates"]] == [True, True]


def test_requests_that_failed_are_counted() -> None:
    live = measured(Timing())
    records = [msgspec.structs.replace(each) for each in live.runs[0].result.records]
    records[-1].error = "status"
    result: RunResult = msgspec.structs.replace(live.runs[0].result, records=records)
    live.runs[0] = msgspec.structs.replace(live.runs[0], result=result)
    failed, fine = compared(live, None)
    assert (failed.failed, fine.failed) == (1, 0)


@pytest.mark.parametrize(("ratio", "holds"), [(1.1, True), (0.9, True), (1.101, False), (0.899, False)])
def test_a_tenth_is_allowed(ratio: float, holds: bool) -> None:
    row = Row(rate=1, requests=9, failed=0, measured={}, ratios={"ttft_p50": 1.0, "tpot_p90": ratio}, attainment=(1, 1))
    assert row.holds is holds
