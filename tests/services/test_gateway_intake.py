"""What the gateway turns away before it is placed, and that the planner hears of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.tiny import tiny_model

from services.api_keys import Tenant
from services.config import GatewayConfig
from services.gateway.errors import ApiError
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.planner.observe import counted
from services.rpc import cluster_pb2

CARD = cluster_pb2.ModelCard(name="tiny", max_model_len=512, num_blocks=64, block_size=16)
TENANT = Tenant(id="", cache="")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GatewayConfig:
    folder = tiny_model(tmp_path_factory.mktemp("intake") / "tiny")
    return GatewayConfig(model=str(folder), model_name="tiny", max_in_flight=4)


def intake(config: GatewayConfig, card: cluster_pb2.ModelCard | None) -> tuple[Intake, GatewayMetrics]:
    models, metrics = Models(config), GatewayMetrics()
    metrics.serves(models)
    running: Any = SimpleNamespace(placements=SimpleNamespace(card=lambda _: card))
    return Intake(config, models, running, metrics), metrics


def arrivals(metrics: GatewayMetrics) -> float:
    """As the planner counts them."""
    from prometheus_client import generate_latest

    totals = counted(generate_latest(metrics.registry).decode())["tiny"].totals
    return totals["choices"] + totals["turned_away"]


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "max_tokens": 4} | fields).encode()


async def test_requests_for_a_model_without_any_worker_are_arrivals(config: GatewayConfig) -> None:
    unknown, metrics = intake(config, None)
    assert arrivals(metrics) == 0  # the planner knows of the model all the same
    with pytest.raises(ApiError, match="come up yet"):
        await unknown.completion(body(prompt=["a", "b"], n=3), TENANT)
    with pytest.raises(ApiError, match="come up yet"):
        await unknown.chat(body(messages=[{"role": "user", "content": "a"}]), TENANT)
    assert arrivals(metrics) == 7
    with pytest.raises(ApiError) as refused:  # nobody could ever serve it
        await unknown.completion(body(prompt="a", temperature=-1), TENANT)
    assert refused.value.status == 400 and arrivals(metrics) == 7


async def test_more_than_may_be_under_way_are_arrivals(config: GatewayConfig) -> None:
    full, metrics = intake(config, CARD)
    full.in_flight = 3
    with pytest.raises(ApiError) as refused:
        await full.completion(body(prompt="a", n=2), TENANT)
    assert refused.value.status == 429 and arrivals(metrics) == 2 and full.in_flight == 3
