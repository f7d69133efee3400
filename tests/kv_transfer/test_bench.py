"""`tandem kv bench` between its two processes: small, whole, and told in JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_transfer.bench.connectors import WAYS
from kv_transfer.connectors import nixl
from services.kv import Connector

BENCH = [sys.executable, "-m", "services.cli", "kv", "bench"]
ROOT = Path(__file__).parents[2]


def test_the_command_knows_every_connector_that_can_be_measured() -> None:
    assert [each.value for each in Connector] == list(dict.fromkeys(way.connector for way in WAYS.values()))


def test_every_connector_of_cpus_and_layout_is_measured_beside_its_link(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [*BENCH, "--size", "4MiB", "--json", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout
    report = json.loads(file.read_text())
    of_devices = ("cuda_ipc", "nccl", "nixl cuda")
    of_cpus = [result for result in report["results"] if result["connector"] not in of_devices]
    measured = [(result["connector"], result["layout"], result["limit"]) for result in of_cpus]
    assert measured == [
        (connector, layout, limit)
        for layout in ("contiguous", "scattered")
        for connector, limit in (
            ("shared_memory", "memory copy"),
            ("tcp", "socket"),
            ("zmq", "socket"),
            ("zmq plain", "socket"),
            ("gloo", "socket"),
            *([("nixl", "memory copy")] if nixl.is_installed() else []),
        )
    ]
    for result in report["results"]:
        assert result["bytes"] == 4 << 20
        assert result["fraction_of_limit"] == pytest.approx(result["gb_per_s"] / result["limit_gb_per_s"])
        assert 0 < result["verified_gb_per_s"] < result["gb_per_s"]
        assert result["latency_us"] > 0 and f"{result['gb_per_s']:.2f}" in shown


def test_one_connector_and_layout_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [*BENCH, "--connector", "tcp", "--layout", "scattered", "--size", "2MiB", "--json", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    (result,) = json.loads(file.read_text())["results"]
    assert (result["connector"], result["layout"]) == ("tcp", "scattered")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a CUDA device")
@pytest.mark.parametrize(("connector", "needed"), [("cuda_ipc", "a CUDA device"), ("nccl", "2 CUDA devices")])
def test_what_this_machine_cannot_measure_is_told(connector: str, needed: str) -> None:
    told = subprocess.run([*BENCH, "--connector", connector], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1 and told.stderr == f"error: {connector}: needs {needed}, torch sees 0\n"


def test_a_size_that_is_none_is_told() -> None:
    told = subprocess.run([*BENCH, "--size", "lots"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1 and told.stderr == "error: 'lots' is not a size; write e.g. 512MiB or 2GiB\n"


def test_help_teaches() -> None:
    told = subprocess.run([*BENCH, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "tandem kv bench --connector tcp" in told and "raw link" in told
