"""Helm installs, upgrades and removes the chart, against an API server in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from fake_kubernetes import FakeKubernetes, fake_kubernetes
from helm_chart import CHART, helm, render

lightkube = pytest.importorskip("lightkube", reason="pip install 'tandem-serve[k8s-dev]'")


class Release:
    """The release `demo` in the namespace `llm`; its history is in Helm's memory."""

    def __init__(self, server: FakeKubernetes) -> None:
        self._server = server
        self._helm = helm.Config(kubeconfig_content=server.kubeconfig(), namespace="llm", storage_driver="memory")

    async def install(self, values: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._helm.install, CHART, "demo", values, namespace="llm", timeout=60)

    async def upgrade(self, values: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(self._helm.upgrade, CHART, "demo", values, namespace="llm", timeout=60)

    async def uninstall(self) -> None:
        await asyncio.to_thread(self._helm.uninstall, "demo", timeout=60)

    def replicas(self, name: str) -> int:
        return int(self._server.existing()["Deployment", f"demo-tandem-{name}"]["spec"]["replicas"])

    async def scale(self, name: str, replicas: int) -> None:
        """As an autoscaler does."""
        from lightkube.resources.apps_v1 import Deployment

        config = lightkube.KubeConfig.from_dict(yaml.safe_load(self._server.kubeconfig()))
        client = lightkube.AsyncClient(config=config, namespace="llm")
        await client.patch(Deployment, f"demo-tandem-{name}", {"spec": {"replicas": replicas}})


@pytest.fixture
async def server() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as started:
        yield started


async def test_install_upgrade_and_remove(server: FakeKubernetes) -> None:
    release = Release(server)
    installed = await release.install({})
    assert "helm --namespace llm test demo" in installed["notes"]
    wanted = {
        (m["kind"], m["metadata"]["name"]) for m in render({}) if m["kind"] != "Pod"
    }  # a test's, made when it runs
    assert server.existing().keys() == wanted
    keys = dict(server.existing()["Secret", "demo-tandem"]["data"])
    assert len(set(keys.values())) == len(keys) == 4

    await release.upgrade({"pools": {"decode": {"replicas": 3}, "prefill": None}})
    assert release.replicas("decode") == 3
    assert ("Deployment", "demo-tandem-prefill") not in server.existing()
    assert dict(server.existing()["Secret", "demo-tandem"]["data"]) == keys  # who was given them goes on

    await release.uninstall()
    assert server.existing() == {}


async def test_an_upgrade_leaves_what_the_autoscaler_chose(server: FakeKubernetes) -> None:
    release = Release(server)
    values = {"gateway": {"autoscaling": {"enabled": True}}}
    await release.install(values)
    for name in ("gateway", "decode"):
        await release.scale(name, 5)
    await release.upgrade(values | {"settings": {"log_level": "debug"}})
    assert (release.replicas("gateway"), release.replicas("decode")) == (5, 1)


async def test_an_upgrade_leaves_what_the_planner_chose(server: FakeKubernetes) -> None:
    release = Release(server)
    values = {"planner": {"enabled": True, "mode": "act"}}
    await release.install(values)
    for name, replicas in (("decode", 3), ("prefill", 0)):
        await release.scale(name, replicas)
    await release.upgrade(values | {"settings": {"log_level": "debug"}})
    assert (release.replicas("decode"), release.replicas("prefill")) == (3, 0)


async def test_an_old_cluster_is_refused() -> None:
    async with fake_kubernetes("1.28.0") as server:
        with pytest.raises(helm.HelmError, match="kubeVersion"):
            await Release(server).install({})
        assert server.existing() == {}
