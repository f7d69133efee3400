"""Dashboards, alerts and configuration of what watches a cluster name metrics and labels that the code exports."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import CollectorRegistry

from services.gateway.metrics import GatewayMetrics
from services.router.metrics import RouterMetrics
from services.worker.metrics import WorkerMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
EVERYWHERE = {"worker", "role", "job", "instance"}  # from the gateway, and from Prometheus
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Those of the design whose part of Tandem exists.
DESIGNED = """tandem_ttft_seconds tandem_tpot_seconds tandem_itl_seconds tandem_requests_total{outcome}
tandem_prompt_tokens_total{source} tandem_kv_transfer_bytes_total{connector} tandem_kv_transfer_seconds
tandem_kv_blocks{state} tandem_kv_blocks_orphaned tandem_router_decision_seconds
tandem_router_overlap_blocks_total{kind}"""


def exported() -> dict[str, set[str]]:
    """Names of samples, with their labels."""
    found: dict[str, set[str]] = {"up": EVERYWHERE, "tandem_member_up": EVERYWHERE}
    for kind in (GatewayMetrics, RouterMetrics, WorkerMetrics):
        registry: CollectorRegistry = kind().registry
        for collector in list(registry._collector_to_names):
            (family,) = collector.describe()
            for suffix in SUFFIXES[family.type]:
                labels = {*collector._labelnames, *EVERYWHERE, *(("le",) if suffix == "_bucket" else ())}
                found[family.name + suffix] = labels
    return found


EXPORTED = exported()


def check(expression: str) -> set[str]:
    """Labels that the result of an expression has, at least. Fails where it names what does not exist."""
    parsed = promql_parser.parse(expression.replace("$__rate_interval", "1m"))
    selectors: list[Any] = []
    groups: list[set[str]] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        if isinstance(node, promql_parser.AggregateExpr):
            groups.append(set(node.modifier.labels) if node.modifier is not None else set())
        return True

    promql_parser.walk(parsed, visit)
    assert selectors, f"no metric in {expression}"
    assert {node.name for node in selectors} <= EXPORTED.keys(), expression
    for node in selectors:
        assert {matcher.name for matcher in node.matchers.matchers} <= EXPORTED[node.name], expression
    common = set.intersection(*(EXPORTED[node.name] for node in selectors))
    for group in groups:
        assert group <= common, f"{group} are no labels of all in {expression}"
    return set.intersection(*groups) if groups else common


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_show_what_exists(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == f"tandem-{path.stem}" and dashboard["title"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    cells = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(cells) == len(panels)
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["targets"]
        assert panel["datasource"]["uid"] == "tandem-prometheus"
        for target in panel["targets"]:
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= check(target["expr"]), panel["title"]


plugins.register_default_plugins()  # which know the options of each type of panel, and queries of Prometheus


def unknown_to_grafana(given: Any, taken: Any, where: str = "") -> list[str]:
    """What of a dashboard Grafana's schema does not take over: paths of fields misspelt or at a wrong place."""
    if isinstance(given, dict) and isinstance(taken, dict):
        missing = [f"{where}.{name}" for name in given.keys() - taken.keys()]
        both = [(given[name], taken[name], f"{where}.{name}") for name in given.keys() & taken.keys()]
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        missing, both = [], [(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(given, taken, strict=True))]
    else:
        return [] if given == taken else [where]
    return missing + [path for pair in both for path in unknown_to_grafana(*pair)]


def through_schema(dashboard: dict[str, Any]) -> Any:
    """The dashboard as Grafana's schema reads it."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(json.dumps(dashboard)))))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert unknown_to_grafana(dashboard, through_schema(dashboard)) == []
    assert all(runtime.panelcfg_config(panel["type"]) for panel in dashboard["panels"])
    panel = dashboard["panels"][0]  # and it finds what it does not know
    for part in (panel, panel["gridPos"], panel["fieldConfig"]["defaults"], panel["options"], panel["targets"][0]):
        part["colour"] = "red"
    wrong = ("", ".fieldConfig.defaults", ".gridPos", ".options", ".targets[0]")
    found = unknown_to_grafana(dashboard, through_schema(dashboard))
    assert sorted(found) == [f".panels[0]{place}.colour" for place in wrong]


def test_all_dashboards_are_there() -> None:
    assert [path.stem for path in DASHBOARDS] == ["kv-transfer", "overview", "router", "slo"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_watch_what_exists(rule: dict[str, Any]) -> None:
    labels = check(rule["expr"])
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels
    assert re.fullmatch(r"\d+[sm]", rule["for"]) and rule["labels"]["severity"] in ("critical", "warning")


@pytest.mark.parametrize(
    "expression",
    [
        "tandem_nothing",
        'tandem_kv_blocks{colour="red"}',
        "sum by (outcome) (tandem_kv_blocks)",
        "rate(tandem_ttft_seconds[1m])",
        "1 + 1",
    ],
)
def test_the_check_finds_mistakes(expression: str) -> None:
    with pytest.raises(AssertionError):
        check(expression)


@pytest.mark.parametrize("name", DESIGNED.split())
def test_metrics_of_the_design_exist(name: str) -> None:
    name, _, label = name.rstrip("}").partition("{")
    labels = EXPORTED.get(name) or EXPORTED[name + "_bucket"]
    assert not label or label in labels


def test_configurations_fit_together() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (rules,) = prometheus["rule_files"]
    assert (DEPLOY / "prometheus" / rules).exists()
    (job,) = prometheus["scrape_configs"]
    assert job["job_name"] == "tandem" and job["static_configs"] == [{"targets": ["gateway:8090"]}]
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/tandem.yaml").read_text())["datasources"]
    assert {source["uid"] for source in sources} == {"tandem-prometheus", "tandem-tempo"}
    collector = yaml.safe_load((DEPLOY / "otel/collector.yaml").read_text())
    for name, pipeline in collector["service"]["pipelines"].items():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= collector[part].keys(), name
