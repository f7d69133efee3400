"""What the chart's values make of it, and which it refuses."""

import json
from typing import Any

import pytest
from helm_chart import ADVISED, CHART, LOCKED, MEASURED, OPEN, PLANNED, SETS, environment, helm, of_kind, pods, render

from services.config import GatewayConfig, KvConfig, PlannerConfig, RouterConfig, WorkerConfig, load

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install 'tandem-serve[k8s-dev]'")
lightkube = pytest.importorskip("lightkube", reason="pip install 'tandem-serve[k8s-dev]'")

from services.cluster_state import ClusterState  # noqa: E402
from services.planner.kubernetes import KubernetesActuator  # noqa: E402

KINDS = {"gateway": GatewayConfig, "router": RouterConfig, "kv": KvConfig, "planner": PlannerConfig}
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.mark.parametrize("name", SETS)
def test_lint(name: str) -> None:
    report = helm.lint(CHART, SETS[name], strict=True, namespace="llm")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
@pytest.mark.parametrize("name", SETS)
def test_kubernetes_takes_it(name: str, version: str) -> None:
    manifests = render(SETS[name])
    assert len(manifests) > 10
    for manifest in manifests:
        if manifest["kind"] != "ServiceMonitor":  # the Prometheus operator's
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_processes_take_what_they_are_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable is a setting of its role, and the role starts with them."""
    for component, pod in pods(render(SETS[name])).items():
        told = {variable: entry.get("value") for variable, entry in environment(pod).items()}
        (container,) = pod["spec"]["containers"]
        if (arguments := container.get("args", []))[:1] != ["serve"]:
            continue
        role = arguments[1]
        kind = KINDS.get(role, WorkerConfig)
        settings = {variable.removeprefix("TANDEM_").lower() for variable in told if variable != "REDIS_PASSWORD"}
        assert settings <= set(kind.__struct_fields__), component
        from_cluster = {"TANDEM_BIND": "10.1.2.3", "TANDEM_STATE": "redis://:secret@redis:6379/0"}
        with monkeypatch.context() as context:
            for variable, value in told.items():
                given = value if value is not None and "$(" not in value else from_cluster.get(variable, "k" * 32)
                context.setenv(variable, given)
            config = load(kind, {} if role in KINDS else {"role": role})
        assert config.bind == "10.1.2.3"
        assert config.cluster_key and config.state


def test_settings_of_the_schema_exist() -> None:
    properties = SCHEMA["properties"]
    for part, kind in (KINDS | {"workers": WorkerConfig}).items():
        names = properties[part]["properties"]["settings"]["propertyNames"]["enum"]
        assert set(names) <= set(kind.__struct_fields__), part
    everywhere = set(properties["settings"]["propertyNames"]["enum"])
    assert everywhere <= set(GatewayConfig.__struct_fields__) & set(RouterConfig.__struct_fields__)


def test_numbers_reach_the_processes_as_numbers() -> None:
    """YAML's are floats in Helm; 8.388608e+06 is none that a setting takes. 0 is a value, too."""
    pod = pods(render({"gateway": {"settings": {"max_body_bytes": 8388608, "request_timeout": 0.5}}}))["gateway"]
    assert environment(pod)["TANDEM_MAX_BODY_BYTES"]["value"] == "8388608"
    assert environment(pod)["TANDEM_REQUEST_TIMEOUT"]["value"] == "0.5"
    told = environment(
        pods(
            render(
                {
                    "workers": {"settings": {"max_overtaking": 4, "threads": 2}},
                    "pools": {"decode": {"settings": {"max_overtaking": 0}}},
                }
            )
        )["decode"]
    )
    assert (told["TANDEM_MAX_OVERTAKING"]["value"], told["TANDEM_THREADS"]["value"]) == ("0", "2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatway": {}}, "gatway"),
        ({"planner": {"mode": "off"}}, "mode"),
        ({"planner": {"settings": {"planner_actuator": "local"}}}, "planner_actuator"),  # the chart sees to it
        ({"kvStore": {"enabled": True}}, "kvStore"),
        ({"gateway": {"replicas": 0}}, "replicas"),
        ({"gateway": {"replicas": "two"}}, "replicas"),
        ({"gateway": {"settings": {"polcy": "prefix"}}}, "polcy"),
        ({"router": {"settings": {"max_in_flight": 3}}}, "max_in_flight"),
        ({"settings": {"cluster_key": "k" * 32}}, "cluster_key"),  # belongs into a Secret
        ({"pools": {"decode": {"role": "planner"}}}, "role"),
        ({"pools": {"Decode": {"role": "decode", "replicas": 1}}}, "Decode"),
        ({"pools": {"more": {"role": "decode"}}}, "replicas"),
        ({"pools": {"decode": {"gpus": -1}}}, "gpus"),
        ({"pools": {"decode": {"antiAffinity": "always"}}}, "antiAffinity"),
        ({"workers": {"sharedMemory": "lots"}}, "sharedMemory"),
        ({"secrets": {"clusterKey": "short"}}, "clusterKey"),
        ({"secrets": {"apiKeys": ["0123456789abcdef,another"]}}, "apiKeys"),
        ({"model": {"path": "models/here"}}, "path"),
        ({"pools": {"decode": {"model": {"path": "/models/x"}}}}, "name"),
        ({"pools": {"decode": {"model": {"path": "/models/x", "name": "a=b"}}}}, "name"),
        ({"state": {"url": "http://redis"}}, "url"),
        ({"metrics": {"from": []}}, "from"),
    ],
)
def test_the_schema_refuses(values: dict[str, Any], message: str) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmValuesError, match=message):
        chart.validate_schema(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pools": {"decode": None}}, "nobody would decode"),
        ({"pools": {"decode": {"replicas": 0}}}, "nobody would decode"),
        ({"pools": {"router": {"role": "decode", "replicas": 1}}}, "another part has that name"),
        ({"pools": {"planner": {"role": "decode", "replicas": 1}}}, "another part has that name"),
        (PLANNED | {"pools": {"fast": {"role": "decode", "replicas": 1}}}, "both decode and fast are decode"),
        ({"redis": {"enabled": False}}, "state.url"),
        ({"state": {"url": "redis://mine"}}, "redis.enabled=false"),
        ({"metrics": {"serviceMonitor": {"enabled": True}}}, "metrics.enabled=true"),
        ({"secrets": {"keysFile": {"enabled": True}}}, "needs its content"),
        ({"secrets": {"existingSecret": "mine", "clusterKey": "k" * 32}}, "beside it"),
    ],
)
def test_values_that_do_not_fit_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm.HelmError, match=message):
        render(values)


def test_the_schema_describes_everything() -> None:
    def undescribed(schema: dict[str, Any], path: str) -> list[str]:
        found = [] if "description" in schema or not path else [path]
        for name, inner in schema.get("properties", {}).items():
            found += undescribed(inner, f"{path}.{name}")
        return found

    assert undescribed(SCHEMA, "") == []
    assert undescribed(SCHEMA["properties"]["pools"]["additionalProperties"], "pools.NAME") == []


def test_every_value_is_in_the_schema() -> None:
    """And every default is allowed: Helm checks what is there, but not what is missing."""

    def unknown(values: Any, schema: dict[str, Any], path: str) -> list[str]:
        if "properties" not in schema:
            return []
        found = sorted(f"{path}.{name}" for name in set(values) ^ set(schema["properties"]))
        for name in set(values) & set(schema["properties"]):
            if isinstance(values[name], dict):
                found += unknown(values[name], schema["properties"][name], f"{path}.{name}")
        return found

    with helm.Chart.load(CHART) as chart:
        assert unknown(chart.values, SCHEMA, "") == [".global"]


def test_pools_of_different_gpus_are_values_only() -> None:
    found = pods(render(SETS["two-kinds-of-gpus"]))
    prefill, decode = found["prefill"]["spec"], found["decode"]["spec"]
    assert prefill["nodeSelector"] != decode["nodeSelector"]
    for spec in (prefill, decode):
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert container["image"].startswith("tandem-worker-gpu:")
        assert spec["tolerations"]
    assert environment(found["prefill"])["TANDEM_CONNECTOR"]["value"] == "nccl"
    assert "requiredDuringSchedulingIgnoredDuringExecution" in decode["affinity"]["podAntiAffinity"]
    assert pods(render(SETS["cpu"]))["prefill"]["spec"]["containers"][0]["image"].startswith("tandem-worker:")


def test_pools_of_another_model() -> None:
    found = {name: environment(pod) for name, pod in pods(render(SETS["models"])).items()}
    paths = {name: told["TANDEM_MODEL"]["value"] for name, told in found.items() if "TANDEM_MODEL" in told}
    own = "/opt/models/SmolLM2-135M-Instruct"
    assert paths == dict.fromkeys(("gateway", "prefill", "decode"), own) | dict.fromkeys(
        ("qwen-prefill", "qwen-decode"), "/models/Qwen3-0.6B"
    )
    assert found["gateway"]["TANDEM_MORE_MODELS"]["value"] == "qwen=/models/Qwen3-0.6B"
    assert found["qwen-decode"]["TANDEM_MODEL_NAME"]["value"] == "qwen"
    assert "TANDEM_MORE_MODELS" not in environment(pods(render({}))["gateway"])


def test_a_planner_that_acts_knows_the_deployments_of_each_model() -> None:
    told = environment(pods(render(PLANNED))["planner"])
    assert told["TANDEM_PLANNER_ACTUATOR"]["value"] == "kubernetes"
    deployments = told["TANDEM_PLANNER_DEPLOYMENTS"]["value"]
    named = KubernetesActuator(ClusterState("redis://127.0.0.1:1/0", "tandem"), deployments, lightkube.AsyncClient)._of
    assert named("SmolLM2-135M-Instruct") == {"prefill": "demo-tandem-prefill", "decode": "demo-tandem-decode"}
    assert named("qwen") == {"prefill": "demo-tandem-qwen-prefill", "decode": "demo-tandem-qwen-decode"}
    assert of_kind(render(PLANNED), "ConfigMap")["planner"]["data"]["profile.json"] == '{"timing": {}}'
    advised = environment(pods(render(ADVISED))["planner"])
    assert advised["TANDEM_PLANNER"]["value"] == "advise" and "TANDEM_PLANNER_ACTUATOR" not in advised


def test_ranks_are_gpus() -> None:
    found = pods(render(SETS["eight-gpus"]))
    deployments = of_kind(render(SETS["eight-gpus"]), "Deployment")
    gpus = 0
    for name in ("prefill", "decode"):
        count = found[name]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert environment(found[name])["TANDEM_TENSOR_PARALLEL"]["value"] == str(count)
        gpus += count * deployments[name]["spec"]["replicas"]
    assert gpus == 8


def test_keys_of_ones_own_and_state_elsewhere() -> None:
    manifests = render({"secrets": {"existingSecret": "mine"}, "redis": {"enabled": False}})
    assert of_kind(manifests, "Secret", "StatefulSet") == {}
    for name, pod in pods(manifests).items():
        sources = [
            e["valueFrom"]["secretKeyRef"]["name"] for e in environment(pod).values() if "secretKeyRef" in str(e)
        ]
        assert set(sources) == {"mine"}, name


def test_without_keys_only_where_it_was_asked_for() -> None:
    assert "TANDEM_OPEN_TO_ALL" not in environment(pods(render({}))["gateway"])
    told = environment(pods(render(OPEN))["gateway"])
    assert told["TANDEM_OPEN_TO_ALL"]["value"] == "true" and "TANDEM_API_KEYS" not in told


def test_the_autoscaler_alone_sets_the_number_of_gateways() -> None:
    manifests = render(SETS["scaled"])
    assert "replicas" not in of_kind(manifests, "Deployment")["gateway"]["spec"]
    target = of_kind(manifests, "HorizontalPodAutoscaler")["gateway"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "demo-tandem-gateway"}


def test_the_monitor_finds_the_admin_port_alone() -> None:
    manifests = render(MEASURED)
    monitor = of_kind(manifests, "ServiceMonitor")[""]["spec"]
    matched = [
        name
        for name, service in of_kind(manifests, "Service").items()
        if monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    ]
    assert matched == ["admin"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["authorization"]["credentials"]["key"] == "admin-key"
    assert endpoint["path"] == "/metrics/share"  # of several gateways: no process is counted twice
    assert "TANDEM_ADMIN_HOST" not in environment(pods(render({}))["gateway"])  # loopback


def test_with_certificates_every_process_has_them_and_asks_itself() -> None:
    """The kubelet's own gRPC probe has no certificate."""
    for name, pod in pods(render(LOCKED)).items():
        (container,) = pod["spec"]["containers"]
        if container.get("args", [])[:1] != ["serve"]:
            continue
        told = environment(pod)
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tls"]
        for variable in ("TANDEM_TLS_CERTIFICATE", "TANDEM_TLS_KEY", "TANDEM_TLS_CA"):
            assert told[variable]["value"].startswith(mount["mountPath"] + "/"), name
        (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "tls"]
        assert volume["secret"]["secretName"] == "members"
        probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe")]
        asks = {"httpGet"} if name == "gateway" else {"exec"}
        assert all(asks <= probe.keys() for probe in probes), name
    assert "TANDEM_TLS_KEY" not in environment(pods(render({}))["decode"])
