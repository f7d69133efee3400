"""What is asked of a Ray cluster, without one: whether it fits, and what is said where it does not."""

import importlib.util
import os

import pytest

from services.config import ConfigError
from services.parts import Part, UpOptions
from services.ray_plan import check_address, does_not_fit, is_taken, model_on_nodes, own_address
from services.up import _settings

NODE = {"CPU": 4.0, "memory": 1e9, "node:10.0.0.1": 1.0}
GPU_NODE = NODE | {"GPU": 2.0}


@pytest.mark.parametrize(
    ("bundles", "nodes", "who"),
    [
        ([{"CPU": 4}], [NODE], ""),
        ([{"CPU": 4}, {"CPU": 4}], [NODE, NODE], ""),
        ([{"CPU": 1}, {"CPU": 3}, {"CPU": 4}], [NODE, NODE], ""),  # the large ones first
        ([{"CPU": 1}, {"CPU": 1, "GPU": 2}], [GPU_NODE, NODE], ""),
        ([{"CPU": 5}], [NODE, NODE], "w0 needs 5 CPU of one node"),
        ([{"CPU": 3}, {"CPU": 3}], [NODE], "w1 needs 3 CPU of one node"),
        ([{"CPU": 1, "GPU": 1}], [NODE], "w0 needs 1 CPU, 1 GPU of one node"),
        ([{"CPU": 4, "GPU": 4}], [GPU_NODE, GPU_NODE], "w0 needs 4 CPU, 4 GPU of one node"),
        ([{"CPU": 1}], [], "w0 needs 1 CPU of one node"),
    ],
)
def test_what_fits(bundles: list[dict[str, float]], nodes: list[dict[str, float]], who: str) -> None:
    problem = does_not_fit({f"w{number}": bundle for number, bundle in enumerate(bundles)}, nodes)
    assert problem.startswith(who) and bool(problem) == bool(who)


def test_nodes_are_told() -> None:
    assert "2 nodes with 4 CPU, 2 GPU; 4 CPU;" in does_not_fit({"decode-0": {"CPU": 9}}, [GPU_NODE, NODE])
    said = is_taken({"a": {"CPU": 1}, "b": {"CPU": 2, "GPU": 1}}, {"CPU": 1.0}, [GPU_NODE])
    assert "(a, b) need 3 CPU, 1 GPU" in said and "1 CPU are free of 1 nodes with 4 CPU, 2 GPU" in said


@pytest.mark.parametrize("on", ["k8s", "ray://", "ray://host", "http://host:1", "10.0.0.1:6379"])
def test_addresses_that_are_none(on: str) -> None:
    with pytest.raises(ConfigError, match="write ray for the Ray cluster of this machine"):
        check_address(on)


def test_addresses() -> None:
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ConfigError, match="pip install"):
            check_address("ray")
    else:
        assert check_address("ray") == ""
        assert check_address("ray://head:10001") == "ray://head:10001"
    assert model_on_nodes("smollm2") == "smollm2"
    assert model_on_nodes("tests") == os.path.abspath("tests")


def test_workers_elsewhere_reach_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _settings(UpOptions(on="ray"), [Part("decode")])["bind"] == own_address("ray")
    assert _settings(UpOptions(on="ray"), [Part("decode")])["threads"] == 1
    assert "bind" not in _settings(UpOptions(), [Part("decode")])
    monkeypatch.setenv("TANDEM_CLUSTER_KEY", "k" * 32)
    monkeypatch.setenv("TANDEM_BIND", "198.18.0.1")
    assert _settings(UpOptions(on="ray"), [Part("decode")])["bind"] == "198.18.0.1"
    for state in ("redis://127.0.0.1:6379/0", "unix:///run/redis.sock"):
        with pytest.raises(ConfigError, match="workers run on other machines and cannot reach it"):
            _settings(UpOptions(on="ray", flags={"state": state}), [Part("decode")])
