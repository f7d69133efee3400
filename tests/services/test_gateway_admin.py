"""Who may ask the admin port."""

import base64

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.gateway.admin import AdminAccess
from services.gateway.metrics import GatewayMetrics

KEY = "the key of the admin port"


async def served(_request: Request) -> PlainTextResponse:
    return PlainTextResponse("served")


async def ask(key: str, headers: dict[str, str], metrics: GatewayMetrics) -> httpx.Response:
    app = AdminAccess(Starlette(routes=[Route("/metrics", served)]), key, metrics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8090") as client:
        return await client.get("/metrics", headers=headers)


def basic(credentials: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(credentials.encode()).decode()}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer " + KEY[:-1]}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": "Basic not base64"}, 401),
        ({"authorization": "Basic"}, 401),
        (basic(KEY), 401),
        (basic(f"{KEY}:"), 401),
        (basic(f"anybody:{KEY}"), 200),
        ({"authorization": f"bearer {KEY}", "host": "tandem.example"}, 200),
        ({"authorization": f"Bearer {KEY}", "origin": "http://127.0.0.1:8090"}, 200),
        ({"authorization": f"Bearer {KEY}", "origin": "http://elsewhere.test"}, 403),
        ({"authorization": f"Bearer {KEY}", "origin": "null"}, 403),
    ],
)
async def test_the_key_opens(headers: dict[str, str], status: int) -> None:
    metrics = GatewayMetrics()
    answer = await ask(KEY, headers, metrics)
    assert answer.status_code == status
    refused = metrics.registry.get_sample_value("tandem_requests_refused_total", {"why": "admin"})
    assert refused == (status != 200)
    if status == 401:
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.headers["www-authenticate"].startswith("Basic ")
    assert KEY not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "localhost:8090"}, 200),
        ({"host": "[::1]:8090"}, 200),
        ({"host": "[::1]"}, 200),
        ({"host": "rebound.test:8090"}, 403),
        ({"host": "192.0.2.1"}, 403),
        ({"origin": "http://127.0.0.1:8090"}, 200),
        ({"origin": "https://evil.test"}, 403),
    ],
)
async def test_without_a_key_pages_of_other_servers_are_kept_out(headers: dict[str, str], status: int) -> None:
    answer = await ask("", headers, GatewayMetrics())
    assert answer.status_code == status
    if status != 200:
        assert answer.json()["error"]["type"] == "permission_error"
