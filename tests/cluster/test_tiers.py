"""The KV service: what workers' caches had to give up comes back from it, over HTTP, with the same tokens."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.restore_run import answers, questions, under_fire
from cluster.streams import kill
from cluster.tiny import SLOW, tiny_model
from faults_hit import must_hit
from object_server import Server
from store import Store

from kv_transfer.tiers import slot_file

TOKENS = 800  # of a prompt
PROMPTS = range(10)  # together far more than a worker keeps
BLOCK = 16
# Copying and writing are best effort: what goes before its turn has come is kept nowhere, on a busy machine more of it.
MOST = 0.7
UNASKED = itertools.count(1000, 20)  # numbers of prompts that no try has asked yet
BLOCK_BYTES = 3 * BLOCK * 2 * (16 + 16) * 4  # layers, tokens, KV heads, K and V, float32
WRITTEN = "tandem_tier_written_bytes_total"


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tiers")
    workers = ("--dummy-seed", "5", "--threads", "1", "--kv-blocks", "160", "--local-prefill-tokens", "0")
    # Host memory has no room for all prompts, either: what comes first comes from the disk.
    tiers = (
        "--fetch-tokens",
        "64",
        "--kv-memory-host",
        "4MiB",
        "--kv-disk",
        f"{folder / 'kept'}:32MiB",
        "--kv-policy",
        "lfu",
    )
    running = start_cluster(folder, *workers, *tiers, model=str(tiny_model(folder / "tiny", **SLOW)))
    yield running
    stop_cluster(running)


@pytest.fixture(scope="module")
def computed(kept: Cluster) -> list[Any]:
    """What the cluster answers while nothing is cached anywhere."""
    answers = [ask(kept, number) for number in PROMPTS]
    assert not any(cached for _, cached in answers)
    return [answer for answer, _ in answers]


def ask(cluster: Cluster, number: int, max_tokens: int = 12) -> tuple[list[Any], int]:
    """Tokens and log probabilities of the answer to a prompt, and how many of the prompt's tokens were cached."""
    body = {
        "model": cluster.model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(TOKENS)],
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 1,
    }
    answer = httpx.post(cluster.url + "/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    logprobs = answer.json()["choices"][0]["logprobs"]
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return [logprobs["tokens"], logprobs["token_logprobs"]], cached


def same(answers: list[Any], expected: list[Any]) -> bool:
    """The same tokens, and the same scores: other chunks of a prompt may change their last bits on some CPUs."""
    return all(
        tokens == other and scores == pytest.approx(others, abs=1e-4)
        for (tokens, scores), (other, others) in zip(answers, expected, strict=True)
    )


def copied(cluster: Cluster, prompts: int) -> None:
    """Until most of so many prompts are kept, and the router knows."""
    cluster.wait_least("tandem_tier_blocks", MOST * prompts * (TOKENS // BLOCK), tier="disk")
    cluster.wait_least("tandem_router_index_blocks", MOST * prompts * (TOKENS // BLOCK))


def test_what_workers_gave_up_is_restored(kept: Cluster, computed: list[Any]) -> None:
    copied(kept, len(PROMPTS))
    again = [ask(kept, number) for number in PROMPTS]
    assert same([answer for answer, _ in again], computed)
    restored = kept.metric("tandem_prompt_tokens_total", source="tier")
    must_hit(restored >= TOKENS / 3 * len(PROMPTS), f"computing was quicker too often: {[each for _, each in again]}")
    assert kept.metric("tandem_tier_hit_blocks_total") * BLOCK >= restored
    assert kept.metric("tandem_tier_hit_blocks_total", tier="disk")
    assert not kept.metric("tandem_prompt_tokens_total", source="fetched")
    kept.wait_idle()


def tandem(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "services.cli", "cache", *arguments, "--url", cluster.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "140"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_people_see_what_is_kept(kept: Cluster, computed: list[Any]) -> None:
    copied(kept, len(PROMPTS))
    (state,) = json.loads(tandem(kept, "show", "--json"))
    assert state["tiers"]["disk"]["blocks"] >= MOST * len(PROMPTS) * (TOKENS // BLOCK) and 0 <= state["hit_rate"] <= 1
    assert state["top"][0]["tokens"] >= BLOCK and len(state["top"][0]["hash"]) == 32
    assert "asked for most" in tandem(kept, "show")
    right = re.search(r"(\d+) blocks are right, 0 were wrong", told := tandem(kept, "verify"))
    assert right and int(right[1]) >= state["tiers"]["disk"]["blocks"], told  # more may have come


def test_the_service_dies_and_comes_back(kept: Cluster, computed: list[Any]) -> None:
    """Killed while it is asked: all is answered. Its successor finds what is on disk, and is asked again."""
    pid = kept.pids["kv"]
    os.kill(pid, signal.SIGSTOP)  # so that fetches are under way when it dies
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, kept, number) for number in PROMPTS]
            time.sleep(0.5)
            kill(kept, "kv")
            assert same([answer.result()[0] for answer in answers], computed)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    copied(kept, len(PROMPTS))  # its successor has found them on disk
    before = kept.metric("tandem_prompt_tokens_total", source="tier")
    assert same([ask(kept, number)[0] for number in PROMPTS], computed)
    must_hit(kept.metric("tandem_prompt_tokens_total", source="tier") > before, "computing was quicker each time")
    kept.wait_idle()


def on_disk(cluster: Cluster) -> tuple[int, list[Any]]:
    """A new prompt of which the disk has all, and its answer."""
    ends = time.monotonic() + 120
    while True:
        number, stored = next(UNASKED), cluster.metric("tandem_tier_stored_blocks_total", tier="disk")
        answer, _ = ask(cluster, number, 200)
        soon = time.monotonic() + 10
        while time.monotonic() < soon:
            if cluster.metric("tandem_tier_stored_blocks_total", tier="disk") >= stored + TOKENS // BLOCK:
                return number, answer
            time.sleep(0.05)
        assert time.monotonic() < ends, "no prompt was written as a whole"


def test_what_waits_is_read_from_disk_meanwhile(kept: Cluster, computed: list[Any]) -> None:
    """All is taken by long answers when a prompt comes that only the disk has; its turn finds it in host memory."""
    waits, answer = on_disk(kept)
    room = kept.metric("tandem_tier_capacity_bytes", tier="host") / BLOCK_BYTES
    stored = kept.metric("tandem_tier_stored_blocks_total", tier="host")
    for number in range(waits + 1, waits + 9):  # more than host memory has room for, and the workers
        ask(kept, number)
    kept.wait_least("tandem_tier_stored_blocks_total", stored + MOST * room, tier="host")
    before = {name: kept.metric("tandem_tier_prefetched_blocks_total", outcome=name) for name in ("read", "used")}
    held = kept.metric("tandem_router_queue_seconds_count")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number in (waits + 10, waits + 11):
            pool.submit(ask, kept, number, 450)
        kept.wait_least("tandem_kv_blocks", 2 * TOKENS // BLOCK, state="active", role="decode")
        time.sleep(1)  # the router is told of what is taken
        again, cached = ask(kept, waits, 200)
    assert same([again], [answer])
    must_hit(kept.metric("tandem_router_queue_seconds_count") > held, "the long answers were over before it came")
    must_hit(cached >= TOKENS / 2, "it was computed before it could be fetched")
    for name, blocks in before.items():
        kept.wait_least("tandem_tier_prefetched_blocks_total", blocks + TOKENS / 3 / BLOCK, outcome=name)
    kept.wait_idle()


def test_people_drop_and_warm(kept: Cluster, computed: list[Any], tmp_path: Path) -> None:
    """What was dropped stays so over a restart; what is warmed is there."""
    dropped = int(tandem(kept, "drop").split()[0])
    assert dropped > 0
    kill(kept, "kv")
    kept.wait_least("tandem_tier_capacity_bytes", 1, tier="disk")  # its successor is there
    (state,) = json.loads(tandem(kept, "show", "--json"))
    assert state["tiers"]["disk"]["blocks"] < dropped  # but for what workers have still
    before = kept.metric("tandem_tier_stored_blocks_total", tier="host")
    body = {"prompt": [(31 * i + next(UNASKED)) % 40_000 + 10 for i in range(TOKENS)]}
    (tmp_path / "prompts").write_text(json.dumps(body) + "\n\n" + f"{next(UNASKED)} " + "word " * 400 + "\n")
    assert tandem(kept, "warm", str(tmp_path / "prompts")).startswith("2 prompts computed")
    assert kept.metric("tandem_tier_stored_blocks_total", tier="host") >= before + MOST * (TOKENS + 400) // BLOCK
    assert same([ask(kept, number)[0] for number in PROMPTS], computed)
    kept.wait_idle()


def test_sleeping_workers_forget_nothing(kept: Cluster, computed: list[Any]) -> None:
    """What only their caches have is copied first; then it is restored."""
    answer, cached = ask(kept, number := next(UNASKED))
    assert not cached
    slept = kept.log.stat().st_size
    for command in ("sleep", "wake"):
        done = [sys.executable, "-m", "services.cli", command, "--url", kept.url]
        assert subprocess.run(done, capture_output=True, timeout=120).returncode == 0
    told = re.findall(r"has what is forgotten +blocks=(\d+) kept=(\d+)", kept.log.read_text()[slept:])
    assert len(told) == 2
    must_hit(all(blocks == copied != "0" for blocks, copied in told), f"sleep was not put off for longer: {told}")
    kept.wait_least("tandem_router_workers", 2)
    before = kept.metric("tandem_prompt_tokens_total", source="tier")
    assert same([ask(kept, number)[0]], [answer])
    must_hit(kept.metric("tandem_prompt_tokens_total", source="tier") > before, "computing was quicker")
    kept.wait_idle()


def test_all_at_once(kept: Cluster) -> None:
    """Evicted, restored, and processes killed: `make restore` in small."""
    asked = questions(16, 4, seed=1)
    alone = [body | {"cache_salt": str(number)} for number, body in enumerate(asked)]  # nothing of them is cached
    expected = asyncio.run(answers(kept, alone, 3))
    books, streams = asyncio.run(under_fire(kept, asked, 8, 6, ("prefill-0", "kv")))
    books.count(kept)
    books.judge(streams, expected)
    assert books.exact == len(asked), books.wrong
    must_hit(books.kills and books.counted["restored"], str(books))
    kept.wait_idle()


def footers(folder: Path) -> Iterator[tuple[Any, ...]]:
    """Of the slots of the file in the folder."""
    (path,) = folder.glob("*.blocks")
    data = path.read_bytes()
    block_bytes = slot_file._HEADER.unpack_from(data)[3]
    slot_bytes = -(-(block_bytes + slot_file.FOOTER_BYTES) // 4096) * 4096
    for start in range(4096, len(data), slot_bytes):
        footer = slot_file._FOOTER.unpack_from(data, start + block_bytes)
        if footer[0] == slot_file._SLOT_MAGIC:
            yield footer


def test_stores_that_clusters_share(tmp_path: Path) -> None:
    """What one cluster computed another one takes from Redis, or from S3 once that is down, or computes."""
    server, objects = Store(), Server()
    tiers = ("--fetch-tokens", "64", "--kv-memory-host", "2MiB")
    shared = ("--kv-redis", server.url, "--kv-s3", f"{objects.url}/bucket")
    workers = ("--dummy-seed", "5", "--threads", "1", "--kv-blocks", "160", "--local-prefill-tokens", "0")
    model, blocks, answers = str(tiny_model(tmp_path / "tiny", **SLOW)), TOKENS // BLOCK, []
    secrets = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    env = secrets | {"TANDEM_CLUSTER_KEY": "a secret of both clusters"}
    packed = env | {"TANDEM_KV_COMPRESSION": "zstd"}  # by the first; the second reads it all the same
    try:
        disk = ("--kv-disk", f"{tmp_path / 'kept'}:32MiB", "--kv-policy", "arc", "--kv-tenant-share", "0.9")
        running = start_cluster(tmp_path / "first", *workers, *tiers, *shared, *disk, model=model, env=packed)
        try:
            answers += [ask(running, number)[0] for number in (1, 2)]
            for tier in ("disk", "redis", "object"):
                running.wait_least("tandem_tier_blocks", 2 * MOST * blocks, tier=tier)
            for tier in ("redis", "object"):
                small, unpacked = (running.metric(WRITTEN, tier=tier, form=form) for form in ("packed", "unpacked"))
                must_hit(small, f"what {tier} took was not answered in time, and so not counted")
                assert small < 0.95 * unpacked
        finally:
            stop_cluster(running)
        known = [footer for footer in footers(tmp_path / "kept") if any(footer[7])]  # as workers' events told
        assert len(known) >= blocks / 2 and len({footer[7] for footer in known}) == 1  # of one tenant
        place = {footer[4]: footer[8] for footer in known}
        assert all(place.get(footer[6], footer[8] - 1) == footer[8] - 1 for footer in known)
        assert any(footer[6] in place for footer in known)
        running = start_cluster(tmp_path / "second", *workers, *tiers, *shared, model=model, env=env)
        try:
            running.wait_least("tandem_router_index_blocks", 2 * MOST * blocks)
            again = [ask(running, 1)[0]]
            hits = running.metric("tandem_tier_hit_blocks_total", tier="redis")
            must_hit(hits >= blocks / 2, f"only {hits} blocks came from Redis in time")
            server.stop()
            before = running.metric("tandem_tier_stored_blocks_total", tier="host")
            again.append(ask(running, 2)[0])
            # As it is in S3, nothing is copied from workers; on a busy machine it is sooner computed than read.
            ends = time.monotonic() + 20
            while (stored := running.metric("tandem_tier_stored_blocks_total", tier="host")) < before + blocks / 3:
                if time.monotonic() > ends:
                    break
                time.sleep(0.1)
            objects.stop()
            ask(running, 3)
            assert same([*again, ask(running, 1)[0]], [*answers, answers[0]])
            running.wait_least("tandem_tier_faults_total", 1, tier="redis")
            if stored < before + blocks / 3:
                pytest.skip("all answers are right, but none came from S3: reading took longer than computing")
        finally:
            stop_cluster(running)
    finally:
        server.stop()
        with contextlib.suppress(Exception):
            objects.stop()
