"""Keys in files, who they stand for, and how much they allow."""

import asyncio
import contextlib
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.api_keys import ANYBODY, KeyEntry, Tenant, entry_for, new_key, read_key_file
from services.config import ConfigError
from services.gateway.access import RECORD, TENANT, Access
from services.gateway.keys import ApiKeys
from services.gateway.metrics import GatewayMetrics
from services.gateway.rates import Rates


def write(file: Path, *entries: KeyEntry) -> None:
    file.write_text("\n".join(entry.toml() for entry in entries))


def test_the_command_makes_keys_that_open(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    keys = {}
    for name in ("alice", "bob"):
        command = [
            sys.executable,
            "-m",
            "services.cli",
            "keys",
            "new",
            name,
            "--tokens-per-minute",
            "70",
            "--weight",
            "2",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        keys[name] = done.stderr.split()[-1]
        assert keys[name] not in done.stdout
        with file.open("a") as appended:
            appended.write(done.stdout)
    assert set(tomllib.loads(file.read_text())["key"][0]) == {"name", "hash", "tokens_per_minute", "weight"}
    opened = {name: ApiKeys("", file).tenant(f"Bearer {key}") for name, key in keys.items()}
    assert [tenant and (tenant.tokens_per_minute, tenant.weight) for tenant in opened.values()] == [(70, 2.0)] * 2
    assert opened["alice"] != opened["bob"]
    wrong = subprocess.run([*command[:5], "a b"], capture_output=True, text=True)
    assert wrong.returncode == 78 and "letters" in wrong.stderr and not wrong.stdout


def test_names_are_tenants_and_groups_share_a_cache(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    old, new, friend, stranger, bare = (new_key() for _ in range(5))
    write(
        file,
        entry_for("alice", old, cache_group="team"),
        entry_for("alice", new, cache_group="team"),
        entry_for("bob", friend, cache_group="team"),
        entry_for("team", stranger),  # the name of a group is nobody's
    )
    keys = ApiKeys(bare, file)
    tenants = [keys.tenant(f"Bearer {key}") for key in (old, new, friend, stranger, bare)]
    alice, also_alice, bob, team, alone = (tenant for tenant in tenants if tenant is not None)
    assert alice == also_alice and alice.id != bob.id and alice.cache == bob.cache
    assert len({alice.cache, team.cache, alone.cache}) == 3
    for nothing in ("", "Bearer", "Bearer ", f"Basic {old}", old, f"Bearer {old[:-1]}", f"Bearer {old} {new}"):
        assert keys.tenant(nothing) is None, nothing


def test_without_keys_everybody_is_let_in_and_with_an_empty_file_nobody(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("")
    assert ApiKeys("").tenant("") is ANYBODY
    assert ApiKeys("", file).tenant("Bearer x") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("key = 3", "cannot be read"),
        ("[[key]", "cannot be read"),
        ("[[keys]]\nname = 'a'", "cannot be read"),
        ("[[key]]\nname = 'a'", "hash"),
        ("[[key]]\nname = 'a'\nhash = 'secret'", "tandem keys new"),
        ("[[key]]\nname = 'a b'\nhash = 'HASH'", "letters"),
        ("[[key]]\nname = 'a'\nhash = 'HASH'\nweight = 0.0", "weight"),
        ("[[key]]\nname = 'a'\nhash = 'HASH'\nweight = nan", "weight"),
        ("[[key]]\nname = 'a'\nhash = 'HASH'\nrequests_per_minute = -1", "negative"),
        ("[[key]]\nname = 'a'\nhash = 'HASH'\nrequests = 1", "requests"),
        ("[[key]]\nname = 'a'\nhash = 'HASH'\nmin_priority = 9999999999", "32 bits"),
    ],
)
def test_malformed_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text.replace("HASH", "sha256:" + "0" * 64))
    with pytest.raises(ConfigError, match=message) as raised:
        read_key_file(file)
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError):
        read_key_file(tmp_path / "nowhere")


async def test_a_changed_file_is_read_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file, other = tmp_path / "keys.toml", tmp_path / "other"
    first, second = new_key(), new_key()
    write(file, entry_for("first", first))
    keys = ApiKeys("", file)
    following = asyncio.create_task(keys.follow())
    try:
        write(other, entry_for("second", second))
        other.rename(file)
        async with asyncio.timeout(20):
            while keys.tenant(f"Bearer {second}") is None:
                await asyncio.sleep(0.05)
        assert keys.tenant(f"Bearer {first}") is None
        file.write_text("[[key]")
        keys.reload()
        assert keys.tenant(f"Bearer {second}") is not None
        file.unlink()
        keys.reload()
        assert keys.tenant(f"Bearer {second}") is not None
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def test_requests_come_back_evenly() -> None:
    rates, tenant = Rates(lambda: 1), Tenant(id="t", requests_per_minute=6)
    assert [rates.admit(tenant, 100.0) for _ in range(6)] == [None] * 6
    refused = rates.admit(tenant, 100.0)
    assert refused is not None and refused[0] == "requests_per_minute"
    assert refused[1].status == 429 and refused[1].retry_after == 10
    assert rates.admit(tenant, 109.0) is not None  # a refused one costs nothing
    assert rates.admit(tenant, 110.5) is None
    assert rates.admit(tenant, 110.5) is not None
    assert rates.admit(Tenant(id="other", requests_per_minute=6), 110.5) is None


def test_tokens_are_paid_as_they_come_and_owed() -> None:
    rates, tenant = Rates(lambda: 1), Tenant(id="t", tokens_per_minute=600)
    assert rates.admit(tenant, 0.0) is None
    rates.charge(tenant, 1200, 0.0)
    refused = rates.admit(tenant, 1.0)
    assert refused is not None and refused[0] == "tokens_per_minute" and refused[1].retry_after == 60
    assert rates.admit(tenant, 61.0) is None


def test_gateways_share_the_limits() -> None:
    gateways = 1
    rates, tenant = Rates(lambda: gateways), Tenant(id="t", requests_per_minute=8)
    assert [rates.admit(tenant, 0.0) for _ in range(4)] == [None] * 4
    gateways = 2
    assert rates.admit(tenant, 0.0) is not None
    assert [rates.admit(tenant, 60.0) for _ in range(5)].count(None) == 4


async def test_what_is_beyond_is_turned_away_unread() -> None:
    """And open paths stay open, also to who has used up what it may."""
    read: list[bytes] = []

    async def complete(request: Request) -> PlainTextResponse:
        read.append(await request.body())
        request.scope[RECORD].charge(40)
        return PlainTextResponse(request.scope[TENANT].id)

    async def live(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("live")

    metrics, keys = GatewayMetrics(), ApiKeys("the-key")
    known = keys.tenant("Bearer the-key")
    assert known is not None
    limited = Tenant(id=known.id, tokens_per_minute=100, requests_per_minute=10)
    keys._tenants = dict.fromkeys(keys._tenants, limited)
    routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/live", live), Route("/v1/models", live)]
    app = Access(Starlette(routes=routes), keys, Rates(lambda: 1), metrics)
    headers = {"authorization": "Bearer the-key"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        answers = [await client.post("/v1/completions", content=b"x", headers=headers) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert answers[0].text == known.id and len(read) == 3
        assert int(answers[3].headers["retry-after"]) >= 12
        assert answers[3].json()["error"]["code"] == "rate_limit_exceeded"
        assert "the-key" not in answers[3].text
        assert (await client.get("/live")).status_code == 200
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401

    def refused(why: str) -> float | None:
        return metrics.registry.get_sample_value("tandem_requests_refused_total", {"why": why})

    assert (refused("tokens_per_minute"), refused("key"), refused("requests_per_minute")) == (1, 1, 0)
    assert metrics.registry.get_sample_value("tandem_requests_total", {"outcome": "client_error"}) == 1
