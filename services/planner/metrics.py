"""Metrics of the planner."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from planner.decision import Decision
from planner.window import ROLES


class PlannerMetrics:
    """Its registry. Gauges are those of the latest decision."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.replicas = Gauge(
            "tandem_planner_replicas",
            "Workers that the latest decision wants, and those that are there",
            ["role", "kind", "model"],
            registry=registry,
        )
        self.attainment = Gauge(
            "tandem_planner_attainment",
            "Share of requests predicted to keep to the objectives with what was chosen, and the measured one",
            ["kind", "model"],
            registry=registry,
        )
        self.arrivals = Gauge(
            "tandem_planner_arrivals",
            "Requests a second: measured, and the forecast's mean and upper end",
            ["kind", "model"],
            registry=registry,
        )
        self.shed = Gauge(
            "tandem_planner_shed", "Part of the requests that routers are to refuse", ["model"], registry=registry
        )
        self.decisions = Counter(
            "tandem_planner_decisions", "Decisions, by what came of them", ["result", "model"], registry=registry
        )
        self.actions = Counter(
            "tandem_planner_actions", "Actions carried out, or failed", ["kind", "outcome"], registry=registry
        )
        self.holds = Counter("tandem_planner_held", "Ticks without a decision", ["why"], registry=registry)
        self.leads = Gauge(
            "tandem_planner_leads", "1: this planner holds the model's lease", ["model"], registry=registry
        )
        for why in ("cluster_state", "lease"):
            self.holds.labels(why)

    def decided(self, decision: Decision) -> None:
        """Takes a decision in."""
        model, chosen = decision.model, decision.chosen
        for role in ROLES:
            actual = decision.have.get(role, 0)
            desired = chosen.count(role) if chosen is not None else actual
            self.replicas.labels(role, "desired", model).set(desired)
            self.replicas.labels(role, "actual", model).set(actual)
        self.attainment.labels("predicted", model).set(chosen.attainment if chosen is not None else float("nan"))
        self.attainment.labels("measured", model).set(decision.window.attained)
        self.arrivals.labels("measured", model).set(decision.window.rate)
        self.arrivals.labels("mean", model).set(decision.forecast.arrivals.mean)
        self.arrivals.labels("upper", model).set(decision.forecast.arrivals.upper)
        self.shed.labels(model).set(decision.shed)
        result = "held" if decision.held else "changes" if decision.actions else "stays"
        self.decisions.labels(result, model).inc()
