"""`tandem simulate`: a load run that is simulated, as a client would have seen it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.config import LoadConfig, WorkloadConfig
from bench.errors import BenchError
from bench.replay.planned import planned_trace
from bench.replay.simulated import settings_of
from bench.replay.traces import load_trace
from planner.simulator.job import BLOCK_SIZE
from planner.simulator.settings import Settings
from planner.simulator.timing import Timing
from services.cli import app


def config(rate: float = 2.0, num_requests: int = 40, **workload: object) -> LoadConfig:
    return LoadConfig(url="", rate=rate, num_requests=num_requests, workload=WorkloadConfig(**workload))  # type: ignore[arg-type]


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments, "--quiet"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def simulate(*flags: str) -> subprocess.CompletedProcess[str]:
    return tandem("simulate", *flags)


def test_groups_share_the_blocks_of_their_prefix_alone() -> None:
    trace = planned_trace(config(name="shared-prefix", prefix_len=3 * BLOCK_SIZE + 10, groups=2, input_len="600"))
    assert len(trace.demands) == 40
    beginnings = {tuple(demand.prompt_hashes[:3]) for demand in trace.demands}
    assert len(beginnings) == 2
    fourth = [demand.prompt_hashes[3] for demand in trace.demands]
    assert len(set(fourth)) == 40  # ten tokens of it are common, and the rest is not
    assert all(demand.prompt_tokens == 3 * BLOCK_SIZE + 610 for demand in trace.demands)
    assert trace.endless_hit_rate == pytest.approx(38 * 3 * BLOCK_SIZE / (40 * (3 * BLOCK_SIZE + 610)))


def test_turns_follow_each_other_and_begin_with_all_that_was_said() -> None:
    trace = planned_trace(config(name="multi-turn", turns="3", input_len="700", output_len="500", prefix_len=0))
    first, second, third, other = trace.demands[:4]
    assert [demand.follows for demand in trace.demands[:5]] == [None, 0, 1, None, 3]
    assert (first.prompt_tokens, second.prompt_tokens, third.prompt_tokens) == (700, 1900, 3100)
    assert second.hashes[: len(first.hashes)] == first.hashes
    assert third.hashes[: len(second.hashes)] == second.hashes
    assert first.think == 0 and second.think == third.think == 1
    assert not set(other.hashes) & set(third.hashes)


def test_a_question_waits_for_its_answer_and_the_users_thinking(tmp_path: Path) -> None:
    flags = ("--workload", "multi-turn", "--turns", "2", "--think", "5", "--rate", "1", "--num-requests", "20")
    done = simulate("--workers", "2", *flags, "--records", str(tmp_path / "r.jsonl"))
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert len(records) == 20
    for question, next_one in zip(records[::2], records[1::2], strict=True):
        assert next_one["sent"] >= question["end"] + 5


@pytest.mark.parametrize("apart", [(), ("--prefill", "2")], ids=["aggregated", "apart"])
def test_the_summary_is_a_load_tests_and_equal_for_equal_seeds(apart: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--workers", "4", *apart, "--rate", "8", "--num-requests", "200", "--workload", "shared-prefix")
    flags += ("--prefix-len", "4000", "--input-len", "500", "--output-len", "100", "--slo", "ttft=1s,tpot=30ms")
    found = []
    for name in ("one", "two"):
        done = simulate(*flags, "--json", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        found.append(json.loads((tmp_path / name).read_text()))
        del found[-1]["started_at"]
    assert found[0] == found[1]
    summary = found[0]
    assert summary["completed"] == summary["requests"] == 200 and summary["valid"]
    assert summary["tokens"]["output"] == 20_000
    # Eight prefixes of which seven blocks are full.
    assert summary["tokens"]["cached"] > 0.5 * 192 * 7 * BLOCK_SIZE
    assert 0 < summary["ttft_ms"]["p50"] < 500 and 4.5 < summary["tpot_ms"]["p50"] < 30
    assert summary["goodput"]["attainment"] == 1.0


def test_fewer_workers_are_slower_and_rates_are_a_ladder(tmp_path: Path) -> None:
    flags = ("--rate", "4,16", "--input-len", "8000", "--output-len", "50", "--num-requests", "150")
    slow, fast = tmp_path / "slow.json", tmp_path / "fast.json"
    assert simulate("--workers", "1", *flags, "--json", str(slow)).returncode == 0
    assert simulate("--workers", "8", *flags, "--json", str(fast)).returncode == 0
    p90 = {path.stem: [run["ttft_ms"]["p90"] for run in json.loads(path.read_text())["runs"]] for path in (slow, fast)}
    assert p90["slow"][0] < p90["slow"][1]
    assert all(one < other for one, other in zip(p90["fast"], p90["slow"], strict=True))


def test_timings_of_another_machine(tmp_path: Path) -> None:
    timing = tmp_path / "timing.json"
    timing.write_text('{"timing": {"step": 0.1, "prompt_token": 1e-3}}')
    flags = ("--workers", "1", "--rate", "0.2", "--num-requests", "5", "--input-len", "1000", "--output-len", "11")
    done = simulate(*flags, "--timing", str(timing), "--json", str(tmp_path / "s.json"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["ttft_ms"]["p50"] == pytest.approx(1000, rel=0.05)
    assert summary["tpot_ms"]["p50"] == pytest.approx(100, rel=0.05)


def test_the_commands_of_the_document_run_and_its_defaults_are_true() -> None:
    document = (Path(__file__).parents[2] / "docs/simulate.md").read_text()
    for command in "".join(re.findall(r"```bash\n(.*?)```", document, re.DOTALL)).splitlines():
        done = tandem(*shlex.split(command)[1:])
        assert done.returncode == 0
        if "--planner" in command:
            (shown,) = re.findall(r"```text\n(planner .*?)```", document, re.DOTALL)
            assert _acts(shown) == _acts(done.stdout) != "none"
            assert _met(shown) == pytest.approx(_met(done.stdout), abs=2)
            alone = tandem(*shlex.split(command.partition(" --planner")[0])[1:])
            (kept,) = re.findall(r"Its two workers alone keep ([0-9.]+)% of", document)
            assert float(kept) == pytest.approx(_met(alone.stdout), abs=2)
    rows = re.findall(r"^\| `([a-z_]+)` \| ([0-9.e-]+|true|false) \|", document, re.MULTILINE)
    told = {name: json.loads(value) for name, value in rows}
    assert told == msgspec.structs.asdict(Timing())


def _acts(output: str) -> str:
    """What the planner did."""
    return output.partition("actions: ")[2].partition(";")[0]


def _met(output: str) -> float:
    """Percent of the requests."""
    (share,) = re.findall(r"([0-9.]+)% met", output)
    return float(share)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--workers", "4"), "give --rate"),
        (("--workers", "4", "--prefill", "4", "--rate", "1"), "at least one must decode"),
        (("--rate", "1", "--policy", "best"), "there is no policy 'best', but"),
        (("--rate", "1", "--policy", "oracle", "--failures", "1"), "leave --failures out"),
        (("--rate", "1", "--policy", "oracle", "--planner", "act"), "leave --planner act out"),
        (("--rate", "1", "--workload", "sonnet"), "simulate one of lengths"),
        (("--rate", "1", "--input-len", "2000000"), "too many for workers that hold"),
        (("--rate", "1", "--timing", "/nowhere"), "says no timing"),
        (("--rate", "1", "--timing", __file__), "says no timing"),
        (("--rate", "1", "--timing", "{negative}"), "step -0.1 is no number that there can be"),
        (("--rate", "1", "--trace", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_flags_say_what_to_do(flags: tuple[str, ...], says: str, tmp_path: Path) -> None:
    negative = tmp_path / "negative.json"
    negative.write_text('{"timing": {"step": -0.1}}')
    done = simulate(*(flag.format(negative=negative) for flag in flags))
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_closed_loop_is_refused() -> None:
    with pytest.raises(BenchError, match="open loop"):
        planned_trace(LoadConfig(url="", concurrency=4, num_requests=5))


def test_the_planner_acts_on_a_simulated_cluster(tmp_path: Path) -> None:
    load = ("--input-len", "2000", "--output-len", "200", "--duration", "8m", "--quiet", "--json", str(tmp_path / "s"))
    objectives = ("--slo", "ttft=1s,tpot=50ms", "--interval", "20", "--start", "30")
    planned = {}
    for mode, workers in (("advise", "4"), ("act", "4"), ("off", "4")):
        done = tandem("simulate", "--workers", workers, "--rate", "2", *load, *objectives, "--planner", mode)
        assert done.returncode == 0, done.stderr
        planned[mode] = json.loads((tmp_path / "s").read_text())
    assert planned["off"]["planner"] is None
    advised, acted = planned["advise"]["planner"], planned["act"]["planner"]
    assert advised["actions"] == 0 < advised["advised"] and advised["worker_hours"] > 4 * 8 / 60
    assert acted["actions"] == sum(acted["by_kind"].values()) > 0 and acted["by_kind"]["remove"] >= 2
    assert acted["worker_hours"] < advised["worker_hours"] and planned["act"]["goodput"]["attainment"] > 0.9


def test_a_failed_worker_loses_no_request(tmp_path: Path) -> None:
    load = ("--rate", "4", "--input-len", "500", "--output-len", "400", "--duration", "3m", "--quiet")
    flags = ("--failures", "60", "--start", "5", "--planner", "advise", "--slo", "ttft=1s,tpot=50ms")
    done = tandem("simulate", "--workers", "4", *load, *flags, "--json", str(tmp_path / "s"))
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "s").read_text())
    assert told["planner"]["failures"] > 3 and told["completed"] == told["requests"] > 500


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--planner", "act"), "give --slo"),
        (("--planner", "act", "--slo", "ttft=1s"), "give --slo"),
        (("--planner", "act", "--slo", "ttft=1s,tpot=1s", "--max-workers", "1"), "less than the 2"),
    ],
)
def test_a_planner_needs_objectives_and_room(flags: tuple[str, ...], said: str) -> None:
    done = tandem("simulate", "--workers", "2", "--rate", "1", "--duration", "5s", *flags)
    assert done.returncode == 2 and said in done.stderr


NUMBERS = ("inf", "nan", "-1", "1e308", str(10**18), "9" * 5000)
FLAGS = (
    *("--rate", "--num-requests", "--seed", "--prefix-len --workload shared-prefix", "--input-len", "--output-len"),
    *("--burstiness --arrival gamma", "--ramp-to --arrival ramp --duration 5s", "--turns --workload multi-turn"),
    *("--think --workload multi-turn", "--duration", "--length-scale --workload mooncake", "--warmup", "--routers"),
    *("--speed --workload mooncake", "--kv-tokens"),
)
SIMULATED = (
    *("--start", "--failures --planner advise --slo ttft=1s,tpot=1s", "--workers", "--prefill", "--max-workers"),
    *("--interval --planner act --slo ttft=1s,tpot=1s", "--kv-memory-host", "--kv-disk --kv-memory-host 90000"),
)
PLANNED = ("--attainment", "--max-workers", "--max-gpus --goodput", "--price --gpu H100 --model llama-8b")


@pytest.mark.parametrize(
    "flags", [f"simulate {each}" for each in FLAGS + SIMULATED] + [f"plan {each}" for each in PLANNED]
)
def test_numbers_that_there_cannot_be_end_with_a_line(flags: str) -> None:
    """Whatever it is, it is refused at once or does no harm; nothing goes on for ever, and nobody sees a traceback."""
    command, flag, *more = flags.split()
    more += ["--rate", "1"] if flag not in ("--rate", "--speed", "--length-scale") else []
    more += ["--num-requests", "3"] if flag not in ("--num-requests", "--duration") else []
    more += ["--slo", "ttft=1s,tpot=50ms"] if command == "plan" else []
    for number in NUMBERS:
        done = CliRunner().invoke(app, [command, "--quiet", *more, f"{flag}={number}"])
        assert done.exit_code in (0, 2), (number, done.exception, done.output)
        assert done.exit_code == 0 or done.stderr.strip(), number
        assert done.exit_code or "completed" in done.stdout or "chosen" in done.stdout, number


def test_a_profile_says_what_a_cache_holds_unless_a_flag_does(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('{"timing": {}, "kv_tokens": 5000}')
    assert settings_of(2, 0, 1, None, profile, 0).kv_tokens == 5000
    assert settings_of(2, 0, 1, 9000, profile, 0).kv_tokens == 9000
    assert settings_of(2, 0, 1, None, None, 0).kv_tokens == Settings.kv_tokens
    done = simulate("--rate", "1", "--num-requests", "3", "--input-len", "6000", "--timing", str(profile))
    assert done.returncode == 2 and "too many for workers that hold 5000" in done.stderr
    profile.write_text('{"timing": {}, "kv_tokens": 1000000000000}')
    with pytest.raises(BenchError, match=r"must be between 1 and 1e\+08"):
        settings_of(2, 0, 1, None, profile, 0)


def test_a_trace_of_endless_prompts_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 2**31 - 1, "output_length": 5, "hash_ids": []}
    trace.write_text("".join(json.dumps(line | {"timestamp": at}) + "\n" for at in (0, 1000)))
    done = simulate("--trace", str(trace))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    with pytest.raises(BenchError, match="more than"):
        load_trace(str(trace), None, limit=0, seed=0)


@pytest.mark.parametrize("command", ["simulate", "plan --slo ttft=1s,tpot=50ms"])
def test_files_that_cannot_be_written_are_told(command: str) -> None:
    """/dev/full takes nothing."""
    done = tandem(*command.split(), "--rate", "1", "--num-requests", "3", "--json", "/dev/full")
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
