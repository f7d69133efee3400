"""What `tandem plan --write` writes, held against compose.yaml and the chart."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.deployment_files import compose_override, parse_write, start_command, write_deployment
from bench.errors import BenchError
from planner.offer import Offer
from planner.sizing import Family

ROOT = Path(__file__).parents[2]
H100, TWO_H100, H200 = Offer(gpu="H100"), Offer(gpu="H100", gpus=2), Offer(gpu="H200")


def services() -> dict[str, Any]:
    text = (ROOT / "compose.yaml").read_text()
    return dict(yaml.safe_load(text)["services"])


def test_each_side_is_on_its_own_cards(tmp_path: Path) -> None:
    apart = write_deployment("helm", tmp_path / "v.yaml", Family(H200, TWO_H100).of(1, 3), measured=False)
    pools = yaml.safe_load(apart.read_text())["pools"]
    assert pools["prefill"]["replicas"] == 1 and pools["prefill"]["gpus"] == 2
    assert pools["decode"]["replicas"] == 3 and pools["decode"]["gpus"] == 1
    assert pools["prefill"]["nodeSelector"] != pools["decode"]["nodeSelector"]


def test_the_chart_makes_these_workers() -> None:
    chart = pytest.importorskip("helm_chart", reason="Helm is not installed")
    from bench.deployment_files import helm_values

    for family, prefill, others in ((Family(H200, TWO_H100), 1, 3), (Family(TWO_H100), 0, 2)):
        values = chart.OPEN | helm_values(family.of(prefill, others), on_gpus=True)
        found = {
            component: (entry["spec"]["replicas"], container["resources"]["limits"]["nvidia.com/gpu"])
            for component, entry in chart.of_kind(chart.render(values), "Deployment", "StatefulSet").items()
            for container in entry["spec"]["template"]["spec"]["containers"]
            if "nvidia.com/gpu" in container.get("resources", {}).get("limits", {})
        }
        wanted = {"aggregated": (2, 2)} if family.prefill is None else {"prefill": (1, 2), "decode": (3, 1)}
        assert {name: (count, int(gpus)) for name, (count, gpus) in found.items()} == wanted


def test_an_override_names_services_of_compose_yaml() -> None:
    there = services()
    cpu = compose_override(Family(Offer(), Offer()).of(2, 3), on_gpus=False)["services"]
    assert cpu.keys() <= there.keys()
    assert {name: each["deploy"]["replicas"] for name, each in cpu.items()} == {"prefill": 2, "decode": 3}
    gpu = compose_override(Family(H100, TWO_H100).of(2, 3), on_gpus=True)["services"]
    assert gpu["prefill"]["deploy"]["replicas"] == gpu["decode"]["deploy"]["replicas"] == 0
    made = {name: each for name, each in gpu.items() if "extends" in each}
    assert [each["command"][1] for each in made.values()] == ["prefill"] * 2 + ["decode"] * 3
    assert all(each["extends"]["service"] in there for each in made.values())
    variables = {name for each in made.values() for name in each["environment"]}
    assert {name for name in variables if name.startswith("TANDEM_")} <= there["gpu"]["environment"].keys()
    assert all(each["image"] == there["gpu"]["image"] for each in made.values())
    assert all(each["build"]["target"] == there["gpu"]["build"]["target"] for each in made.values())
    assert "devices" not in str(there["prefill"]), "or they would be added to"
    cards = [
        card
        for each in made.values()
        for device in each["deploy"]["resources"]["reservations"]["devices"]
        for card in device["device_ids"]
    ]
    assert cards == [str(number) for number in range(7)], "no card is two workers'"
    with pytest.raises(BenchError, match="give --write helm"):
        compose_override(Family(H200, H100).of(1, 1), on_gpus=True)


def test_what_is_written_and_where(tmp_path: Path) -> None:
    assert parse_write("helm") == ("helm", Path("values.plan.yaml"))
    assert parse_write(f"compose={tmp_path}/mine.yaml") == ("compose", tmp_path / "mine.yaml")
    for text, why in (("swarm", "give compose or helm"), (f"helm={tmp_path}/none/x", "cannot be a file")):
        with pytest.raises(BenchError, match=why):
            parse_write(text)
    assert start_command(Family(TWO_H100, TWO_H100).of(1, 2)) == "tandem up --prefill 1 --decode 2 --tensor-parallel 2"
    assert "--write" in start_command(Family(H100, TWO_H100).of(1, 2))
