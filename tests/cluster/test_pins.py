"""Pinned prefixes stay in the KV service while others flood it: over HTTP, with the same tokens."""

import asyncio
import itertools
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster.harness import Cluster, free_port, start_cluster, stop_cluster
from cluster.test_tiers import BLOCK, TOKENS
from cluster.tiny import SLOW, tiny_model
from faults_hit import must_hit

from services.cluster_state import ClusterState
from services.rpc import cluster_pb2
from services.running import of_command

BLOCKS = TOKENS // BLOCK
UNASKED = itertools.count(100, 50)  # numbers of prompts that no try has asked yet
SETTINGS = {"TANDEM_KV_PIN_SHARE": "0.5", "TANDEM_KV_PIN_TENANT_SHARE": "0.25", "TANDEM_KV_PIN_SECONDS": "900"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Host memory for almost seven prompts; workers keep three each."""
    folder = tmp_path_factory.mktemp("pins")
    workers = ("--dummy-seed", "5", "--threads", "1", "--kv-blocks", "160", "--local-prefill-tokens", "0")
    tiers = ("--fetch-tokens", "64", "--kv-memory-host", "4MiB")
    running = start_cluster(folder, *workers, *tiers, model=str(tiny_model(folder / "tiny", **SLOW)), env=SETTINGS)
    yield running
    stop_cluster(running)


def prompt(number: int) -> list[int]:
    return [(37 * number + 11 * i) % 40_000 + 10 for i in range(TOKENS)]


def ask(cluster: Cluster, number: int, **headers: str) -> tuple[list[str], int, dict[str, str]]:
    """Tokens of the answer, how many of the prompt's were cached, and what is told of the pin."""
    body = {"model": cluster.model, "prompt": prompt(number), "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(cluster.url + "/v1/completions", json=body | {"logprobs": 0}, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    told = dict(each.strip().split("=") for each in answer.headers.get("x-tandem-pin", "").split(",") if each)
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer.json()["choices"][0]["logprobs"]["tokens"], cached, told


def pinning(session: str, seconds: str) -> dict[str, str]:
    return {"X-Session-Id": session, "X-Tandem-Pin": seconds}


def flood(cluster: Cluster, first: int) -> None:
    """Prompts that nobody asked for, more than workers and KV service have room for together.

    Of what a worker has computed the service gets most: it is given up before it is copied, where the machine is busy.
    """

    def stored() -> float:
        return cluster.metric("tandem_tier_stored_blocks_total", tier="host")

    enough = stored() + 8 * BLOCKS
    for number in range(first, first + 40, 2):  # of which a worker keeps three
        soon, before = time.monotonic() + 5, stored()
        ask(cluster, number)
        ask(cluster, number + 1)
        while stored() < before + 2 * BLOCKS and time.monotonic() < soon:
            time.sleep(0.05)
        if stored() >= enough:
            return
    must_hit(False, "the KV service takes too little")


def test_a_session_keeps_its_prefix_until_it_ends(cluster: Cluster) -> None:
    pinned, _, told = ask(cluster, 1, **pinning("s", "600"))
    assert told["blocks"] == str(BLOCKS) and told["seconds"] == "600" and "limit" not in told
    plain, _, untold = ask(cluster, 2)
    assert not untold
    cluster.wait_least("tandem_tier_pinned_blocks", BLOCKS)
    cluster.wait_least("tandem_tier_stored_blocks_total", BLOCKS, tier="host")
    flood(cluster, next(UNASKED))
    again, cached, _ = ask(cluster, 1)
    assert again == pinned
    must_hit(cached >= TOKENS - 2 * BLOCK, f"{cached} tokens came in time")
    again, cached, _ = ask(cluster, 2)
    assert again == plain and cached == 0
    cluster.wait_idle()
    assert cluster.metric("tandem_kv_blocks_orphaned") == 0
    _, _, told = ask(cluster, 3, **pinning("s", "1e9"))  # another prompt takes its place, for as long as may be
    assert told["seconds"] == "900"
    _, _, told = ask(cluster, 3, **pinning("s", "0"))
    assert told["blocks"] == "0"
    flood(cluster, next(UNASKED))
    assert ask(cluster, 1)[1] == ask(cluster, 3)[1] == 0
    wait_for_none(cluster)


def test_pins_are_bounded_and_end_by_themselves(cluster: Cluster) -> None:
    room = int(0.25 * cluster.metric("tandem_tier_capacity_bytes", tier="host") / block_bytes(cluster))
    assert BLOCKS < room < 2 * BLOCKS
    assert "limit" not in ask(cluster, 10, **pinning("first", "2"))[2]
    _, _, told = ask(cluster, 11, **pinning("second", "600"))
    assert told["limit"] == "tenant" and int(told["blocks"]) == room - BLOCKS
    refused = cluster.metric("tandem_tier_pin_refused_blocks_total", limit="tenant")
    assert refused == 2 * BLOCKS - room
    ends = 0
    while ask(cluster, 11, **pinning("second", "600"))[2].get("limit"):  # until the first one is over
        ends += 1
        assert ends < 200
    for seconds, session, code in (
        ("soon", "s", "invalid_pin"),
        ("-1", "s", "invalid_pin"),
        ("600", "", "invalid_pin"),
    ):
        headers = {"X-Tandem-Pin": seconds} | ({"X-Session-Id": session} if session else {})
        body = {"model": cluster.model, "prompt": [1, 2, 3]}
        answer = httpx.post(cluster.url + "/v1/completions", json=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == code, answer.text
    ask(cluster, 11, **pinning("second", "0"))


def wait_for_none(cluster: Cluster) -> None:
    ends = time.monotonic() + 60
    while cluster.metric("tandem_tier_pins") or cluster.metric("tandem_tier_pinned_blocks"):
        assert time.monotonic() < ends, "something is pinned still"
        time.sleep(0.05)


def block_bytes(cluster: Cluster) -> float:
    return cluster.metric("tandem_tier_bytes", tier="host") / cluster.metric("tandem_tier_blocks", tier="host")


def tandem(cluster: Cluster, *arguments: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "services.cli", "cache", *arguments, "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "140"})
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_prompts_of_a_file_are_pinned_until_unpinned(cluster: Cluster, tmp_path: Path) -> None:
    tandem(cluster, "unpin", "--all")  # of a try before
    prompts = tmp_path / "prompts"
    prompts.write_text(json.dumps({"prompt": prompt(20)}) + "\n")
    assert f"{BLOCKS} blocks" in tandem(cluster, "pin", str(prompts))
    cluster.wait_least("tandem_tier_pinned_blocks", BLOCKS)
    (state,) = json.loads(tandem(cluster, "show", "--json"))
    (shown,) = state["pinned"]["prompts"]
    assert (shown["blocks"], shown["blocks_here"], state["pinned"]["sessions"]) == (BLOCKS, BLOCKS, 0)
    assert "pinned until unpinned" in tandem(cluster, "show")
    flood(cluster, next(UNASKED))
    cached = ask(cluster, 20)[1]
    must_hit(cached >= TOKENS - 2 * BLOCK, f"{cached} tokens came in time")
    # It counts for no tenant, and for all.
    assert "limit" not in ask(cluster, 21, **pinning("a", "600"))[2]
    (tmp_path / "more").write_text(json.dumps({"prompt": prompt(22) + prompt(23)}) + '\n{"prompt": [1, 2, 3]}\n')
    said = tandem(cluster, "pin", str(tmp_path / "more"), status=1)
    assert "more, line 1" in said and "kv_pin_" in said and "line 2: it does not fill" in said
    assert "1 prompts" in tandem(cluster, "unpin", str(prompts))
    assert "1 prompts" in tandem(cluster, "unpin", "--all")
    ask(cluster, 21, **pinning("a", "0"))
    wait_for_none(cluster)


def test_what_only_workers_have_is_kept_again(cluster: Cluster, tmp_path: Path) -> None:
    """After a drop: they compute nothing of it anew, and tell of nothing."""
    prompts = tmp_path / "prompts"
    prompts.write_text(json.dumps({"prompt": prompt(40)}) + "\n")
    tandem(cluster, "warm", str(prompts))
    tandem(cluster, "drop")
    assert f"1 prompts computed; {BLOCKS} blocks in all tiers" in tandem(cluster, "warm", str(prompts))
    tandem(cluster, "drop")
    tandem(cluster, "pin", str(prompts))
    cluster.wait_least("tandem_tier_pinned_blocks", BLOCKS)
    tandem(cluster, "unpin", "--all")
    wait_for_none(cluster)


def test_a_service_that_fails_is_told_by_the_exit_code(cluster: Cluster) -> None:
    """One that has died is a member for a while: the others do what was asked, and the command ends with 1."""
    ask(cluster, 30)

    async def with_a_ghost(*commands: str) -> list[str]:
        running = of_command(cluster.url)
        state = ClusterState(running.state, running.cluster)
        await state.connect()
        try:
            ghost = {"name": "ghost", "role": "kv", "incarnation": secrets.token_hex(16)}
            await state.register(cluster_pb2.Member(**ghost, grpc_address=f"127.0.0.1:{free_port()}"))
            return [await asyncio.to_thread(tandem, cluster, command, status=1) for command in commands]
        finally:
            await state.close()

    verified, dropped = asyncio.run(with_a_ghost("verify", "drop"))
    assert "0 were wrong" in verified and "ghost fails" in verified and "ghost fails" in dropped
    assert int(dropped.split()[0]) > 0
    assert "blocks are forgotten" in tandem(cluster, "drop")
