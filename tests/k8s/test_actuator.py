"""Workers of Kubernetes deployments: their scale, against an API server in memory."""

from pathlib import Path

import pytest
from fake_kubernetes import FakeKubernetes, fake_kubernetes
from structlog.testing import capture_logs

lightkube = pytest.importorskip("lightkube", reason="no client: pip install 'tandem-serve[k8s]'")

from services.cluster_state import ClusterState  # noqa: E402
from services.config import ConfigError  # noqa: E402
from services.planner.actuators import ActuatorFailed  # noqa: E402
from services.planner.kubernetes import KubernetesActuator  # noqa: E402
from services.rpc import cluster_pb2  # noqa: E402

POD = "tandem-prefill-7c5d"


class Known(ClusterState):
    """Members as a test says."""

    known: list[cluster_pb2.Member] = []

    def members(self, *roles: str) -> list[cluster_pb2.Member]:
        return [member for member in self.known if member.role in roles]


def client(server: FakeKubernetes, folder: Path) -> "lightkube.AsyncClient":
    path = folder / "kubeconfig"
    path.write_text(server.kubeconfig())
    return lightkube.AsyncClient(config=lightkube.KubeConfig.from_file(path), namespace="llm")


def deployment(name: str, replicas: int) -> dict[str, object]:
    labels = {"app": name}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "worker", "image": "tandem"}]}}
    spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pod}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name, "namespace": "llm"}, "spec": spec}


def replicas(server: FakeKubernetes, name: str) -> int:
    return int(server.existing()[("Deployment", name)]["spec"]["replicas"])


async def test_replicas_come_and_go(tmp_path: Path) -> None:
    state = ClusterState("redis://127.0.0.1:1/0", "tandem")
    async with fake_kubernetes() as server:
        from lightkube.resources.apps_v1 import Deployment
        from lightkube.resources.core_v1 import Pod

        kube = client(server, tmp_path)
        await kube.create(Deployment.from_dict(deployment("tandem-decode", 1)))
        pod = {
            "metadata": {"name": "tandem-decode-7c5d-a", "namespace": "llm"},
            "spec": {"containers": [{"name": "worker"}]},
        }
        await kube.create(Pod.from_dict(pod))
        actuator = KubernetesActuator(state, "decode=tandem-decode,Qwen/Qwen3/decode=qwen-decode", kube)
        await actuator.add("model", "decode")
        assert replicas(server, "tandem-decode") == 2
        # Nobody has joined the cluster state yet.
        assert [(each.role, each.state) for each in await actuator.starting("model")] == [("decode", "starting")] * 2
        await actuator.remove("tandem-decode-7c5d-a", cluster_pb2.Member(name="tandem-decode-7c5d-a"))
        assert replicas(server, "tandem-decode") == 1
        told = server.existing()[("Pod", "tandem-decode-7c5d-a")]["metadata"]["annotations"]
        assert told == {"controller.kubernetes.io/pod-deletion-cost": "-1000"}
        with pytest.raises(ActuatorFailed, match="names none for prefill workers of model"):
            await actuator.add("model", "prefill")
        with pytest.raises(ActuatorFailed, match="of no deployment"):
            await actuator.remove("tandem-decode-big-7c5d-a", None)
        await kube.create(Deployment.from_dict(deployment("qwen-decode", 0)))
        await actuator.add("Qwen/Qwen3", "decode")
        assert (replicas(server, "tandem-decode"), replicas(server, "qwen-decode")) == (1, 1)
        gone = KubernetesActuator(state, "decode=gone", kube)
        with pytest.raises(ActuatorFailed, match="refuses or does not answer"):
            await gone.add("model", "decode")
        await actuator.close()


async def test_without_the_right_to_patch_pods_kubernetes_chooses_unless_nobody_might_decode(tmp_path: Path) -> None:
    flipped, other, third = (
        cluster_pb2.Member(name=f"{POD}-{name}", role=role, incarnation=name)
        for name, role in (("a", "decode"), ("b", "prefill"), ("c", "decode"))
    )
    state = Known("redis://127.0.0.1:1/0", "tandem")
    async with fake_kubernetes() as server:
        from lightkube.resources.apps_v1 import Deployment

        kube = client(server, tmp_path)
        server.forbidden = "pods"
        await kube.create(Deployment.from_dict(deployment("tandem-prefill", 3)))
        actuator = KubernetesActuator(state, "prefill=tandem-prefill", kube)
        state.known = [flipped, other]
        with pytest.raises(ActuatorFailed, match="who decodes last might go"):
            await actuator.remove(other.name, other)
        assert replicas(server, "tandem-prefill") == 3
        state.known.append(third)
        await actuator.remove(other.name, other)
        assert replicas(server, "tandem-prefill") == 2
        await actuator.close()


@pytest.mark.parametrize("deployments", ["", "decode", "gateway=tandem"])
def test_what_names_no_deployment_is_refused(deployments: str) -> None:
    with pytest.raises(ConfigError, match="planner_deployments"):
        KubernetesActuator(ClusterState("redis://127.0.0.1:1/0", "tandem"), deployments)


def worker(name: str, model: str, **fields: bool) -> cluster_pb2.Member:
    member = cluster_pb2.Member(name=name, role="decode", incarnation=name, **fields)
    member.model.name = model
    return member


async def test_a_pod_that_ends_is_no_replica_and_one_that_only_drains_is(tmp_path: Path) -> None:
    state = Known("redis://127.0.0.1:1/0", "tandem")
    async with fake_kubernetes() as server:
        from lightkube.resources.apps_v1 import Deployment

        kube = client(server, tmp_path)
        await kube.create(Deployment.from_dict(deployment("tandem-decode", 2)))
        actuator = KubernetesActuator(state, "decode=tandem-decode", kube)
        stays = worker("tandem-decode-7c5d-a", "model")
        state.known = [stays, worker("tandem-decode-7c5d-b", "model", draining=True)]
        assert not await actuator.starting("model")
        state.known = [stays, worker("tandem-decode-7c5d-b", "model", draining=True, leaving=True)]
        assert len(await actuator.starting("model")) == 1  # the one that Kubernetes starts in its place
        await actuator.close()


async def test_another_model_without_deployments_of_its_own_gets_none_of_the_firsts(tmp_path: Path) -> None:
    state = Known("redis://127.0.0.1:1/0", "tandem")
    async with fake_kubernetes() as server:
        from lightkube.resources.apps_v1 import Deployment

        kube = client(server, tmp_path)
        await kube.create(Deployment.from_dict(deployment("tandem-decode", 2)))
        actuator = KubernetesActuator(state, "decode=tandem-decode", kube)
        state.known = [worker("tandem-decode-7c5d-a", "second"), worker("elsewhere-0", "first")]
        assert await actuator.starting("first") == []
        with pytest.raises(ActuatorFailed, match=r"those without a model are of second; name one as first/decode=NAME"):
            await actuator.add("first", "decode")
        assert replicas(server, "tandem-decode") == 2
        assert len(await actuator.starting("second")) == 1
        state.known = []  # at rest it is still the one that had them
        assert await actuator.starting("first") == [] and len(await actuator.starting("second")) == 2
        # Nobody has a worker in them yet: who has some elsewhere is not the one.
        fresh = KubernetesActuator(state, "decode=tandem-decode", kube)
        state.known = [worker("elsewhere-0", "first")]
        assert await fresh.starting("first") == [] and len(await fresh.starting("second")) == 2
        # None is without a model.
        named = KubernetesActuator(state, "second/decode=tandem-decode", kube)
        state.known = []
        with capture_logs() as logs:
            assert await named.starting("first") == []
        assert [entry["model"] for entry in logs] == ["first"]
        with pytest.raises(ActuatorFailed, match=r"workers of third; name one as third/decode=NAME"):
            await named.add("third", "decode")
        await actuator.close()
