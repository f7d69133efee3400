"""The Helm chart, rendered by Helm itself."""

from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="Helm is not installed: pip install 'tandem-serve[k8s-dev]'")

CHART = Path(__file__).parents[1] / "k8s/tandem"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
OPEN = {"openToAll": True, "redis": {"enabled": False}, "state": {"url": "redis://redis.example:6379/0"}}
MEASURED = {"metrics": {"enabled": True, "serviceMonitor": {"enabled": True}}}
SCALED = {"gateway": {"autoscaling": {"enabled": True}}, "networkPolicy": {"enabled": False}}
HASHED = {"secrets": {"keysFile": {"enabled": True, "content": "[[key]]\nname = 'alice'\nhash = 'sha256:0'\n"}}}
KEPT = {
    "kv": {
        "enabled": True,
        "settings": {"kv_memory_host": "1GiB", "kv_disk": "/kept:20GiB"},
        "volume": {"persistentVolumeClaim": {"claimName": "kept"}},
    }
}
LOCKED = {"tls": {"existingSecret": "members"}}
QWEN = {"name": "qwen", "path": "/models/Qwen3-0.6B"}
MODELS = {"pools": {f"qwen-{role}": {"role": role, "replicas": 1, "model": QWEN} for role in ("prefill", "decode")}}
ADVISED = {"planner": {"enabled": True}}
PLANNED = {
    "planner": {
        "enabled": True,
        "mode": "act",
        "replicas": 2,
        "settings": {"planner_minimum": "prefill=1,decode=1", "planner_workers": 6},
        "profile": '{"timing": {}}',
        "patchPods": True,
    }
} | MODELS
SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "open": OPEN,
    "measured": MEASURED,
    "scaled": SCALED,
    "hashed": HASHED,
    "locked": LOCKED,
    "models": MODELS,
    "kept": KEPT,
    "advised": ADVISED,
    "planned": PLANNED,
} | {path.stem: yaml.safe_load(path.read_text()) for path in EXAMPLES}

Manifest = dict[str, Any]


def render(values: Manifest) -> list[Manifest]:
    """All manifests of a release `demo` in the namespace `llm`. Raises HelmError."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="demo", namespace="llm")
    texts = [text for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def of_kind(manifests: list[Manifest], *kinds: str) -> dict[str, Manifest]:
    """Manifests of these kinds by name, without the release's."""
    found = [manifest for manifest in manifests if manifest["kind"] in kinds]
    return {m["metadata"]["name"].removeprefix("demo-tandem").removeprefix("-"): m for m in found}


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The pods that the manifests bring about: their metadata and spec, by name."""
    found = of_kind(manifests, "Deployment", "StatefulSet", "Pod")
    return {name: m if m["kind"] == "Pod" else m["spec"]["template"] for name, m in found.items()}


def environment(pod: Manifest) -> dict[str, Manifest]:
    """What the pod's one container is told, by variable."""
    (container,) = pod["spec"]["containers"]
    return {entry["name"]: entry for entry in container.get("env", [])}
