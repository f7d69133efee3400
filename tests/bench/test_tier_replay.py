"""The grid of tiers, peers and policies, through the command."""

import json
import subprocess
import sys
from pathlib import Path


def test_the_grid_shows_who_had_what(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = ["-m", "bench.tier_replay", "--requests", "150", "--working-sets", "1.5", "--workers", "2"]
    command += ["--ways", "peer,host,all", "--policies", "optimum", "--policy-ways", "host", "--json", str(found)]
    told = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True, timeout=300)
    cells = {(cell["way"], cell["policy"]): cell for cell in json.loads(found.read_bytes())["replays"]}
    assert list(cells) == [("off", "lru"), ("peer", "lru"), ("host", "lru"), ("all", "lru"), ("host", "optimum")]
    assert len(told.stdout.splitlines()) == 2 + len(cells)
    off, peer, host = cells["off", "lru"], cells["peer", "lru"], cells["host", "lru"]
    assert off["fetched_rate"] == 0 and not off["written_blocks"]
    assert peer["fetched_rate"] > 0 and not peer["restored_rate"]
    assert host["restored_rate"]["host"] > 0 and host["written_blocks"]["host"] > 0
    assert set(cells["all", "lru"]["written_blocks"]) == {"host", "disk", "redis"}
    assert cells["host", "optimum"]["hit_rate"] > off["hit_rate"]
    picture = tmp_path / "found.svg"
    command = ["-m", "bench.tier_picture", str(found), "--plot", str(picture)]
    subprocess.run([sys.executable, *command], check=True, timeout=300)
    assert "<svg" in picture.read_text()
