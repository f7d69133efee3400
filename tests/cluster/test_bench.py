"""`tandem bench` against real clusters: every workload, every command, prefix sharing as predicted."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.tiny import tiny_model

from engine.weights.resolve import resolve

WORKLOADS = {
    "random": "--input-len 20-60 --output-len normal:8,2",
    "shared-prefix": "--prefix-len 64 --input-len 16 --output-len 4 --groups 3",
    "multi-turn": "--input-len 12 --output-len 6 --turns 2-3 --think 0.05",
    "sonnet": "--input-len 90 --output-len 4",
    "sharegpt": "--think 0",
    "mooncake": "--length-scale 1/32 --speed 20",
    "azure": "--length-scale 1/16 --speed 20",
    "burstgpt": "--length-scale 1/16 --speed 50",
    "lengths": "--length-scale 1/8",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Fast, with room for all prefixes."""
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_model(folder / "tiny")
    flags = ("--prefill", "1", "--decode", "1", "--dummy-seed", "5", "--threads", "1", "--kv-memory", "256MiB")
    running = start_cluster(folder, *flags, model=str(model))
    yield running
    running.wait_idle()
    stop_cluster(running)


def bench(command: str, folder: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Runs `tandem bench` and returns its JSON."""
    tokenizer = str(resolve() / "tokenizer.json")
    flags = ["--tokenizer", tokenizer, "--quiet", "--max-send-lag", "1s", "--json", str(folder / "out.json")]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "bench", command, *arguments, *flags],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize(
    ("workload", "endpoint"),
    [*((workload, ("completions", "chat")[at % 2]) for at, workload in enumerate(WORKLOADS)), ("multi-turn", "chat")],
)
def test_every_workload_arrives_as_it_was_made(tiny: Cluster, tmp_path: Path, workload: str, endpoint: str) -> None:
    flags = ["--workload", workload, *WORKLOADS[workload].split(), "--endpoint", endpoint]
    found = bench("run", tmp_path, "--url", tiny.url, *flags, "--num-requests", "8")
    assert (found["requests"], found["completed"], found["errors"], found["valid"]) == (8, 8, {}, True)
    assert found["tokens"]["wrong_input_length"] == found["tokens"]["wrong_output_length"] == 0
    assert found["ttft_ms"]["p50"] > 0 and found["throughput"]["output_tokens_per_s"] > 0


def test_prefixes_are_shared_as_the_trace_says(tiny: Cluster, tmp_path: Path) -> None:
    """One request at a time, so that what was asked before is in the cache; blocks of the trace are KV blocks."""
    flags = ["--workload", "mooncake", "--length-scale", "1/32", "--concurrency", "1", "--num-requests", "40"]
    found = bench("run", tmp_path, "--url", tiny.url, *flags, "--seed", "11")["tokens"]
    assert found["predicted_cached"] > 300
    assert found["cached"] == pytest.approx(found["predicted_cached"], rel=0.02)


def test_sweep_and_goodput_with_reports(tiny: Cluster, tmp_path: Path) -> None:
    small = ["--url", tiny.url, "--num-requests", "12", "--input-len", "16", "--output-len", "6"]
    report = ["--report", str(tmp_path / "r.html"), "--plots", str(tmp_path / "p")]
    slo = ["--slo", "ttft=10s,tpot=5s,itl_p99=10s"]
    swept = bench("sweep", tmp_path, *small, "--rate", "10,20", *slo, *report)
    assert [run["load"] for run in swept["runs"]] == [10, 20]
    assert all(run["goodput"]["attainment"] == 1 for run in swept["runs"])
    assert (tmp_path / "r.html").stat().st_size > 50_000 and (tmp_path / "p/attainment.png").exists()
    counted = bench("sweep", tmp_path, *small, "--concurrency", "1,3")
    assert [run["config"]["concurrency"] for run in counted["runs"]] == [1, 3]
    found = bench("goodput", tmp_path, *small, *slo, "--rate", "8", "--max-probes", "2")
    assert found["search"]["rate"] == 16
    nothing = bench("goodput", tmp_path, *small, "--slo", "ttft=1us", "--rate", "8", "--max-probes", "2")
    assert nothing["search"]["rate"] == 0


def test_compare_starts_and_stops_its_targets(tiny: Cluster, tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    command = (
        f"{shlex.quote(sys.executable)} -m services.cli up --aggregated 1 --dummy-seed 5 --threads 1 --kv-memory 64MiB"
    )
    targets = [f"apart={tiny.url}", f"together={command} --model {shlex.quote(str(model))} --port {{port}}"]
    small = ["--rate", "20", "--num-requests", "10", "--input-len", "16", "--output-len", "6", "--rounds", "2"]
    found = bench("compare", tmp_path, *targets, *small)
    assert [run["target"] for run in found["runs"]] == ["apart", "together", "together", "apart"]
    assert {ratio["target"] for ratio in found["ratios"]} == {"together"}
    assert all(ratio["ratio"] > 0 for ratio in found["ratios"])
    left = subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True).stdout
    assert left == ""


def test_answers_are_checked(tiny: Cluster, tmp_path: Path) -> None:
    small = ["--url", tiny.url, "--num-requests", "10", "--workload", "multi-turn", "--input-len", "8", "--think", "0"]
    small += ["--output-len", "6", "--concurrency", "3"]
    records = tmp_path / "r.jsonl"
    first = bench("run", tmp_path, *small, "--check", "greedy", "--records", str(records))
    assert first["check"]["compared"] > 0 and first["check"]["equal"] == first["check"]["compared"]
    second = bench("run", tmp_path, *small, "--expect", str(records))
    assert second["check"]["compared"] == second["check"]["equal"] == 10
    lines = records.read_text().replace('"text":"', '"text":"x', 1)
    records.write_text(lines)
    third = bench("run", tmp_path, *small, "--expect", str(records), status=1)
    assert third["check"]["equal"] == 9 and len(third["check"]["different"]) == 1


def test_unruly_clients_leave_nothing_behind(tiny: Cluster, tmp_path: Path) -> None:
    mix = "slow=25%,disconnect=25%,cancel=20%,bad=20%"
    flags = ["--rate", "20", "--num-requests", "60", "--input-len", "24", "--output-len", "40", "--mix", mix]
    found = bench("run", tmp_path, "--url", tiny.url, *flags)
    clients = found["clients"]
    assert set(clients) == {"slow", "disconnect", "cancel", "bad"}
    assert all(each["as_expected"] == each["sent"] for each in clients.values()), clients
    assert found["errors"] == {} and found["requests"] == 60 - sum(each["sent"] for each in clients.values())
    tiny.wait_idle()


def test_load_processes_share_the_work(tiny: Cluster, tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    flags = ["--rate", "30", "--num-requests", "31", "--input-len", "8-30", "--output-len", "5", "--workers", "2"]
    found = bench("run", tmp_path, "--url", tiny.url, *flags, "--records", str(records))
    assert found["completed"] == 31
    ids = [json.loads(line)["id"] for line in records.read_text().splitlines()]
    assert ids == list(range(31))
