"""What is beneath the KV service fails: no answer is wrong, none is missing."""

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.restore_run import answers
from cluster.streams import Stream
from cluster.tiny import SLOW, tiny_model
from faults_hit import must_hit
from store import Store

TOKENS = 320  # of a prompt
PROMPTS = range(10)
BLOCK = 16
UNASKED = itertools.count(2000)  # prompts that no try has asked yet
BLOCKS = len(PROMPTS) * TOKENS // BLOCK
WORKERS = ("--dummy-seed", "5", "--threads", "1", "--kv-blocks", "32", "--local-prefill-tokens", "0")
TIERS = ("--fetch-tokens", "64", "--kv-memory-host", "1MiB")  # for 4 of them


def question(number: int, tokens: int = TOKENS, max_tokens: int = 12) -> dict[str, Any]:
    prompt = [(37 * number + 11 * i) % 40_000 + 10 for i in range(tokens)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0.9 * (number % 2), "seed": number}
    return body | {"ignore_eos": True, "logprobs": 0, "stream": True}


@dataclass
class Kept:
    """A cluster, and what it answered while nothing was cached."""

    cluster: Cluster
    computed: list[Stream]
    folder: Path

    def ask(self, at_once: int = 4) -> None:
        """All prompts again, in any order: the same answers."""
        order = random.sample(PROMPTS, len(PROMPTS))
        again = asyncio.run(answers(self.cluster, [question(number) for number in order], at_once))
        compare(again, [self.computed[number] for number in order])


def compare(streams: list[Stream], expected: list[Stream]) -> None:
    for stream, right in zip(streams, expected, strict=True):
        assert stream.error is None and stream.finish == "length"
        assert stream.tokens == right.tokens and stream.scores == pytest.approx(right.scores, abs=1e-4)


def started(folder: Path, *options: str, within: tuple[str, ...] = ()) -> Kept:
    model = str(tiny_model(folder / "tiny", **SLOW))
    env = {"TANDEM_CLUSTER_KEY": "a secret of this cluster"}
    cluster = start_cluster(folder, *WORKERS, *TIERS, *options, model=model, env=env, within=within)
    return Kept(cluster, asyncio.run(answers(cluster, [question(number) for number in PROMPTS], 1)), folder)


@pytest.fixture(scope="module")
def beneath(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kept, Store]]:
    """A cluster whose KV service has Redis beneath."""
    server = Store()
    try:
        kept = started(tmp_path_factory.mktemp("redis"), "--kv-redis", server.url)
        yield kept, server
        stop_cluster(kept.cluster)
    finally:
        server.stop()


@contextlib.contextmanager
def hanging(server: Store) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextlib.contextmanager
def slow(server: Store) -> Iterator[None]:
    """Nothing is answered for most of the time."""
    with during(server, lambda client: client.client_pause(300)):
        yield


@contextlib.contextmanager
def dropping(server: Store) -> Iterator[None]:
    """Connections end again and again."""
    with during(server, lambda client: client.client_kill_filter(_type="normal", skipme=True)):
        yield


@contextlib.contextmanager
def during(server: Store, disturb: Callable[["redis.Redis"], object]) -> Iterator[None]:
    over = threading.Event()

    def repeat() -> None:
        with redis.Redis.from_url(server.url) as client:
            while not over.wait(0.05):
                disturb(client)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def read_only(server: Store) -> Iterator[None]:
    """As after a failover to another one: READONLY is the answer to what is written."""
    with redis.Redis.from_url(server.url) as client:
        client.replicaof("127.0.0.1", "1")
        try:
            yield
        finally:
            client.replicaof("NO", "ONE")


@contextlib.contextmanager
def wrong_values(server: Store) -> Iterator[None]:
    """Noise, a pickle, an older form and the values of other blocks, in the place of what was written."""
    with redis.Redis.from_url(server.url) as client:
        names = sorted(client.keys("*"))
        values = client.mget(names)
        dice = random.Random(1)
        made: list[Callable[[bytes], bytes]] = [
            lambda value: dice.randbytes(len(value)),
            lambda value: (
                b"\x80\x04\x95\x16\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x06tokens\x94]\x94(K\x01K\x02K\x03es."
            ),
            lambda value: value[:4] + b"\0\0\0\0" + value[8:],
            lambda value: dice.choice(values),
            lambda value: value[:-1] + bytes([value[-1] ^ 1]),
        ]
        assert len(names) > BLOCKS / 2
        client.mset({name: dice.choice(made)(value) for name, value in zip(names, values, strict=True)})
        yield


@contextlib.contextmanager
def emptied(server: Store) -> Iterator[None]:
    server.empty()
    yield


@contextlib.contextmanager
def down(server: Store) -> Iterator[None]:
    """Killed, and empty when it comes back."""
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.mark.parametrize("fault", [down, emptied, dropping, read_only, wrong_values, slow, hanging])
def test_redis(beneath: tuple[Kept, Store], fault: Callable[[Store], AbstractContextManager[None]]) -> None:
    kept, server = beneath
    kept.cluster.wait_least("tandem_tier_blocks", BLOCKS / 2, tier="redis")
    with fault(server):
        kept.ask()
    if fault is down:  # it is used again
        kept.ask()
        kept.cluster.wait_least("tandem_tier_blocks", BLOCKS / 2, tier="redis")
        ends = time.monotonic() + 60
        while not kept.cluster.metric("tandem_tier_hit_blocks_total", tier="redis"):
            must_hit(time.monotonic() < ends, "nothing came from Redis in time")
            kept.ask()
    kept.cluster.wait_idle()


def test_host_memory_goes_on(beneath: tuple[Kept, Store]) -> None:
    """While Redis is late again and again."""
    kept, server = beneath
    near = [question(next(UNASKED), max_tokens=2) for _ in range(3)]
    stored = kept.cluster.metric("tandem_tier_stored_blocks_total", tier="host")
    computed = asyncio.run(answers(kept.cluster, near, 1))
    kept.cluster.wait_least("tandem_tier_stored_blocks_total", stored + 0.7 * len(near) * TOKENS / BLOCK, tier="host")
    with hanging(server):
        kept.ask(1)  # of these host memory has one at most
        must_hit(kept.cluster.metric("tandem_kv_fetches_total", outcome="late") >= 1, "nothing was asked of Redis")
        before, ends = kept.cluster.metric("tandem_tier_hit_blocks_total", tier="host"), time.monotonic() + 60
        while kept.cluster.metric("tandem_tier_hit_blocks_total", tier="host") < before + TOKENS / BLOCK:
            must_hit(time.monotonic() < ends, "nothing came from host memory")
            compare(asyncio.run(answers(kept.cluster, near, 1)), computed)
    kept.cluster.wait_idle()


# A filesystem that is smaller than the disk tier may be, shared memory that is too small for the KV service, and in it
# what a dead worker left.
_LEFT = "tandem-kv-0123456789abcdef0123456789abcdef"
_SMALL = f"""
mount -t tmpfs -o size=1100k tmpfs /dev/shm && mount -t tmpfs -o size=2m tmpfs "$1" && shift &&
head -c 500k /dev/zero > /dev/shm/{_LEFT} && exec "$@"
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    folder = tmp_path_factory.mktemp("small")
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    within = ("unshare", "-m", "sh", "-c", _SMALL, "sh", str(disk))
    kept = started(folder, "--kv-disk", f"{disk}:1GiB", within=within)
    yield kept
    stop_cluster(kept.cluster)


def kept_file(kept: Kept) -> Path:
    """The disk tier's file, in its mount namespace."""
    (path,) = Path(f"/proc/{kept.cluster.pids['kv']}/root{kept.folder}/disk").glob("kv-*.blocks")
    return path


def test_shared_memory_is_full(small: Kept) -> None:
    """What was left there is removed, and the KV service is of use, whoever finds room there and who sends by TCP."""
    assert not (Path("/proc") / str(small.cluster.pids["kv"]) / "root" / "dev/shm" / _LEFT).exists()
    for _ in range(6):  # on a busy machine computing is quicker than most fetches
        small.ask()
        if small.cluster.metric("tandem_prompt_tokens_total", source="tier"):
            return
    must_hit(False, "no fetch from the KV service was in time")


def test_disk_is_full(small: Kept) -> None:
    """It keeps what there is room for, and goes on when somebody else has taken the rest."""
    small.cluster.wait_least("tandem_tier_blocks", 24, tier="disk")
    small.ask()
    with (kept_file(small).parent / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(4096))
    small.ask()
    must_hit(small.cluster.metric("tandem_tier_hit_blocks_total", tier="disk"), "nothing came from the disk in time")
    assert small.cluster.metric("tandem_tier_blocks", tier="disk") < BLOCKS


def noise(path: Path) -> None:
    with path.open("r+b") as file:
        for at in range(5000, path.stat().st_size, 30_000):
            file.seek(at)
            file.write(b"noise")


def swapped(path: Path) -> None:
    """The halves change places."""
    with path.open("r+b") as file:
        content = file.read()
        half = (len(content) - 4096) // 2
        file.seek(4096)
        file.write(content[4096 + half : 4096 + 2 * half] + content[4096 : 4096 + half])


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def deleted(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [noise, swapped, truncated, deleted])
def test_the_file_is_damaged(small: Kept, damage: Callable[[Path], None]) -> None:
    """While it is used."""
    small.cluster.wait_least("tandem_tier_blocks", 24, tier="disk")
    damage(kept_file(small))
    small.ask()
    small.cluster.wait_idle()


def test_the_disk_fails(small: Kept, tmp_path: Path) -> None:
    """EIO from the kernel, as the service sees it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    small.cluster.wait_least("tandem_tier_blocks", 16, tier="disk")
    calls = "pread64,preadv,preadv2,pwrite64,pwritev,pwritev2,fallocate,ftruncate"
    trace = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls"), "-e", f"inject={calls}:error=EIO"]
    with subprocess.Popen([*trace, "-p", str(small.cluster.pids["kv"])], stderr=subprocess.PIPE) as strace:
        time.sleep(0.5)
        if strace.poll() is not None:
            pytest.skip("no process can be traced here")
        try:
            small.ask()
            for _ in range(6):  # what is new is written
                asyncio.run(answers(small.cluster, [question(next(UNASKED))], 1))
            small.cluster.wait_least("tandem_tier_faults_total", 1, tier="disk")
        finally:
            strace.terminate()
    failed = [line for line in (tmp_path / "calls").read_text().splitlines() if "(INJECTED)" in line]
    assert failed and all("EIO" in line for line in failed)
    small.ask()
    small.cluster.wait_idle()


def test_more_requests_than_blocks(small: Kept) -> None:
    """Workers of 32 blocks are asked for 24 answers at once: some are preempted, and go on as if they had not been.

    What they had is computed again, or comes back from the KV service: which, rates decide.
    """
    asked = [question(1000 + number, 50 + number, 48) for number in range(8)]
    alone = asyncio.run(answers(small.cluster, asked, 2))
    before = small.cluster.metric("tandem_preemptions_total")
    at_once = [body | {"cache_salt": f"{turn} {before}"} for turn in range(3) for body in asked]  # they share nothing
    compare(asyncio.run(answers(small.cluster, at_once, 24)), 3 * alone)
    must_hit(small.cluster.metric("tandem_preemptions_total") > before, "there was room for all")
    small.cluster.wait_idle()
