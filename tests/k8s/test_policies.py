"""What pods of the chart keep to: they are not root, write nothing, ask nobody for more, and answer their probes."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_chart import CHART, MEASURED, OPEN, PLANNED, SETS, Manifest, environment, of_kind, pods, render


@pytest.fixture(params=SETS)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(SETS[request.param])


def test_pods_are_locked_down(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys(), name
        security = spec["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] >= 10000, name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume], name
        for container in spec["containers"] + spec.get("initContainers", []):
            locked = container["securityContext"]
            assert locked["readOnlyRootFilesystem"] and not locked["privileged"], name
            assert not locked["allowPrivilegeEscalation"] and locked["capabilities"] == {"drop": ["ALL"]}, name
            assert not [port for port in container.get("ports", []) if "hostPort" in port], name


def test_images_and_resources_are_named(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        for container in pod["spec"]["containers"]:
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            assert tag and tag != "latest", name
            resources = container["resources"]
            assert resources["requests"].keys() >= {"cpu", "memory"} and "memory" in resources["limits"], name


def test_volumes_are_bounded_and_the_rest_is_read_only(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        for volume in pod["spec"]["volumes"]:
            assert volume["name"] in ("models", "kept", "keys", "tls", "profile") or volume["emptyDir"]["sizeLimit"], (
                name
            )
        for mount in pod["spec"]["containers"][0]["volumeMounts"]:
            assert mount["mountPath"] in ("/tmp", "/dev/shm", "/kept") or mount["readOnly"], name


def test_secrets_are_never_written_out(manifests: list[Manifest]) -> None:
    secret_words = ("KEY", "KEYS", "PASSWORD")
    for name, pod in pods(manifests).items():
        for variable, entry in environment(pod).items():
            if variable.endswith(secret_words) and variable != "TANDEM_TLS_KEY":  # the path of a file
                assert "secretKeyRef" in entry["valueFrom"], (name, variable)
        container = pod["spec"]["containers"][0]
        flags = " ".join(container.get("args", []))
        assert not any(word in flags.upper() for word in secret_words), name


def test_only_a_planner_that_acts_may_ask_the_api_server(manifests: list[Manifest]) -> None:
    assert not {manifest["kind"] for manifest in manifests} & {"ClusterRole", "ClusterRoleBinding"}
    planner = pods(manifests).get("planner")
    acts = planner is not None and environment(planner)["TANDEM_PLANNER"]["value"] == "act"
    accounts = of_kind(manifests, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    askers = {"planner"} if acts else set()
    assert accounts.keys() == {""} | askers
    for name, pod in pods(manifests).items():
        account = accounts["planner" if name in askers else ""]["metadata"]["name"]
        assert pod["spec"]["serviceAccountName"] == account, name
        assert pod["spec"]["automountServiceAccountToken"] is (name in askers), name
    assert of_kind(manifests, "Role").keys() == of_kind(manifests, "RoleBinding").keys() == askers


def test_a_planner_that_acts_may_scale_its_own_workers_alone() -> None:
    manifests = render(PLANNED)
    (role,), (binding,) = (of_kind(manifests, kind).values() for kind in ("Role", "RoleBinding"))
    scaled, patched = role["rules"]
    workers = {
        deployment["metadata"]["name"]
        for deployment in of_kind(manifests, "Deployment").values()
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] == "worker"
    }
    assert set(scaled["resourceNames"]) == workers
    assert (scaled["resources"], scaled["verbs"]) == (["deployments/scale"], ["get", "patch"])
    assert (patched["resources"], patched["verbs"]) == (["pods"], ["patch"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (pods(manifests)["planner"]["spec"]["serviceAccountName"], "llm")
    (only,) = of_kind(render({"planner": {"enabled": True, "mode": "act"}}), "Role")["planner"]["rules"]
    assert only["resources"] == ["deployments/scale"]
    # Of all pods this one alone gets beyond the release, names and the state.
    policies = of_kind(manifests, "NetworkPolicy").items()
    out = {name: policy["spec"]["egress"] for name, policy in policies if "egress" in policy["spec"]}
    assert out.keys() == {"", "planner"}
    assert out["planner"] == [{"ports": [{"port": port, "protocol": "TCP"} for port in (443, 6443)]}]


def test_everything_is_of_the_release_and_its_namespace(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        assert manifest["metadata"].get("namespace", "llm") == "llm"
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


def test_probes_ask_what_the_processes_answer(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        if container.get("args", [])[:1] != ["serve"]:
            continue
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        told = environment(pod)
        assert str(ports["grpc"]) == told["TANDEM_RPC_PORT"]["value"], name
        startup, ready, live = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
        if name == "gateway":
            assert [probe["httpGet"]["path"] for probe in (startup, ready, live)] == ["/live", "/health", "/live"]
            assert str(ports["http"]) == told["TANDEM_PORT"]["value"]
        else:
            asked = [probe.get("grpc", probe.get("exec")) for probe in (startup, ready, live)]
            by_itself = {"command": ["tandem", "probe"]}  # with mutual TLS, which the kubelet does not talk
            assert asked == [by_itself if "TANDEM_TLS_CERTIFICATE" in told else {"port": ports["grpc"]}] * 3, name
        # Longer than a worker may be silent before it counts as hung, and longer to start than to hang.
        assert live["periodSeconds"] * live["failureThreshold"] >= 20, name
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 120, name


def test_what_drains_has_the_time_for_it(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        told = environment(pod)
        (container,) = pod["spec"]["containers"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        drain = float(told["TANDEM_DRAIN_SECONDS"]["value"]) if "TANDEM_DRAIN_SECONDS" in told else 0.0
        if pod.get("kind") != "Pod":
            assert pod["spec"]["terminationGracePeriodSeconds"] >= int(before[1]) + drain + 10, name


def test_budgets_and_selectors_match_their_pods(manifests: list[Manifest]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, have in labels.items() if selector.items() <= have.items()}

    for name, workload in of_kind(manifests, "Deployment", "StatefulSet").items():
        assert chosen(workload["spec"]["selector"]["matchLabels"]) == {name}
        for spread in workload["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert chosen(spread["labelSelector"]["matchLabels"]) == {name}
    budgets = of_kind(manifests, "PodDisruptionBudget")
    assert budgets.keys() == of_kind(manifests, "Deployment").keys()
    for name, budget in budgets.items():
        assert chosen(budget["spec"]["selector"]["matchLabels"]) == {name}
        assert budget["spec"]["maxUnavailable"] == 1  # a budget that permits none would keep nodes from being drained
    for name, service in of_kind(manifests, "Service").items():
        (pod,) = chosen(service["spec"]["selector"])
        named = {port["name"] for port in pods(manifests)[pod]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named, name


def allowed(policies: list[Manifest], labels: dict[str, str], namespace: dict[str, str] | None) -> set[Any]:
    """Ports of a pod with `labels` that a stranger reaches; `namespace`: the labels of its own, None: outside."""
    ports: set[Any] = set()
    for policy in policies:
        spec = policy["spec"]
        if not spec["podSelector"].get("matchLabels", {}).items() <= labels.items():
            continue
        for rule in spec["ingress"] if "Ingress" in spec["policyTypes"] else []:
            peers = rule.get("from")
            let_in = peers is None or any(
                "namespaceSelector" in peer
                and namespace is not None
                and peer["namespaceSelector"].get("matchLabels", {}).items() <= namespace.items()
                for peer in peers
            )
            if let_in:
                ports |= {port["port"] for port in rule.get("ports", [{"port": "all"}])}
    return ports


@pytest.mark.parametrize("values", [{}, OPEN, MEASURED, PLANNED])
def test_strangers_reach_the_gateway_alone(values: dict[str, Any]) -> None:
    manifests = render(values)
    policies = list(of_kind(manifests, "NetworkPolicy").values())
    elsewhere, monitoring = {"kubernetes.io/metadata.name": "x"}, {"kubernetes.io/metadata.name": "monitoring"}
    for name, pod in pods(manifests).items():
        labels = pod["metadata"]["labels"]
        selected = [p for p in policies if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()]
        assert any("Egress" in p["spec"]["policyTypes"] for p in selected), name
        http = {"http"} if name == "gateway" else set()
        admin = {"admin"} if name == "gateway" and values is MEASURED else set()
        assert allowed(policies, labels, None) == allowed(policies, labels, elsewhere) == http, name
        assert allowed(policies, labels, monitoring) == http | admin, name


def test_pods_reach_each_other_names_and_the_state_only() -> None:
    for values, rules in (({}, 2), (OPEN, 3)):
        (policy,) = (p for p in of_kind(render(values), "NetworkPolicy").values() if "egress" in p["spec"])
        among, names, *state = policy["spec"]["egress"]
        assert among == {"to": [{"podSelector": policy["spec"]["podSelector"]}]}
        assert {port["port"] for port in names["ports"]} == {53}
        assert [port["port"] for rule in state for port in rule["ports"]] == [6379] * (rules - 2)


def test_clients_can_be_narrowed_down() -> None:
    peer = {"podSelector": {"matchLabels": {"app": "ingress"}}}
    policies = of_kind(render({"networkPolicy": {"clients": [peer]}}), "NetworkPolicy")
    assert policies["gateway"]["spec"]["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}], "from": [peer]}]


def checkov_finds(folder: Path) -> set[tuple[str, str]]:
    """What checkov has against the manifests in a folder: the policy and the resource."""
    command = ["checkov", "--config-file", str(CHART.parent / "checkov.yaml"), "-d", str(folder), "-o", "json"]
    done = subprocess.run([*command, "--skip-download"], capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 100 and not report["summary"]["parsing_errors"], done.stderr[-2000:]
    return {(found["check_id"], found["resource"]) for found in report["results"]["failed_checks"]}


@pytest.mark.skipif(shutil.which("checkov") is None, reason="checkov is not on the PATH: docs/kubernetes.md")
def test_checkov_finds_nothing(tmp_path: Path) -> None:
    for name, values in SETS.items():
        manifests = render(values)
        for manifest in manifests:
            manifest["metadata"].setdefault("namespace", "llm")  # as Helm does when it installs them
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(manifests))
    assert checkov_finds(tmp_path) == set()
    weak = pods(manifests)["router"] | {"apiVersion": "v1", "kind": "Pod"}  # it does find what is wrong
    weak["metadata"] |= {"name": "weak", "namespace": "llm"}
    weak["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    (tmp_path / "weak.yaml").write_text(yaml.safe_dump(weak))
    assert ("CKV_K8S_16", "Pod.llm.weak") in checkov_finds(tmp_path)
