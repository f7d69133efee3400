"""`tandem kv bench` on CUDA devices, as many as there are.

Needs a device, torch, Triton, pytest, and what the package `tandem-serve` requires.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pydantic", reason="needs what tandem-serve requires")
DEVICES = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")]

BENCH = [sys.executable, "-m", "services.cli", "kv", "bench", "--size", "8MiB"]
ROOT = Path(__file__).parents[2]
TWO = pytest.mark.skipif(DEVICES < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("connector", ["cuda_ipc", pytest.param("nccl", marks=TWO)])
def test_a_connector_between_devices_is_measured_beside_a_copy(connector: str, tmp_path: Path) -> None:
    """That what arrived is what was sent is part of what the command does."""
    file = tmp_path / "results.json"
    command = [*BENCH, "--connector", connector, "--json", str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(file.read_text())
    assert (report["skipped"], report["failed"]) == ([], [])
    assert report["receiver_device"] == torch.cuda.get_device_name(0)
    assert report["sender_device"] == torch.cuda.get_device_name(min(1, DEVICES - 1))
    assert report["peer_access"] is (torch.cuda.can_device_access_peer(0, 1) if DEVICES > 1 else None)
    copy = "peer copy" if DEVICES > 1 else "device copy"
    results = report["results"]
    assert [(result["connector"], result["layout"], result["limit"]) for result in results] == [
        (connector, layout, copy) for layout in ("contiguous", "scattered")
    ]
    for result in results:
        assert result["bytes"] == 8 << 20 and result["latency_us"] > 0
        assert 0 < result["verified_gb_per_s"] < result["gb_per_s"]


@pytest.mark.skipif(DEVICES > 1, reason="there are two CUDA devices")
def test_one_device_is_not_enough_for_nccl() -> None:
    told = subprocess.run([*BENCH, "--connector", "nccl"], cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 1 and told.stderr == "error: nccl: needs 2 CUDA devices, torch sees 1\n"
