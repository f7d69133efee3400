"""`make restore`: requests whose KV is evicted, restored and preempted while processes are killed, against plain ones.

A cluster without a KV service and with room for all says what is right. The other one has far less room than what is
asked for again and again, a KV service with a disk, and somebody who kills its processes.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import Stream, follow, kill
from cluster.tiny import tiny_model

_FAILURE = Path("restore-failure.log")  # what the processes of a cluster logged whose answers were not all right
_VICTIMS = ("kv", "decode-0", "prefill-0", "kv", "decode-1")
_SCORES = 1e-4  # that log probabilities may differ, where a CPU's last bits depend on how a prompt is cut
_COUNTED = {
    "restored": ("tandem_prompt_tokens_total", {"source": "tier"}),
    "fetched": ("tandem_prompt_tokens_total", {"source": "fetched"}),
    "computed": ("tandem_prompt_tokens_total", {"source": "computed"}),
    "preemptions": ("tandem_preemptions_total", {}),
    "from disk": ("tandem_tier_hit_blocks_total", {"tier": "disk"}),
    "evicted": ("tandem_tier_evicted_blocks_total", {"tier": "host"}),
}


def questions(count: int, documents: int, seed: int) -> list[dict[str, Any]]:
    """Requests about `documents` long texts, each asked about many times: greedy and sampled, of any length."""
    dice = random.Random(seed)
    texts = [[dice.randrange(10, 40_000) for _ in range(dice.randrange(100, 600))] for _ in range(documents)]
    asked = []
    for number in range(count):
        ending = [dice.randrange(10, 40_000) for _ in range(dice.randrange(1, 40))]
        body = {"prompt": dice.choice(texts) + ending, "max_tokens": dice.randrange(40, 200), "seed": number}
        body |= {"temperature": dice.choice((0, 0.9)), "ignore_eos": True, "logprobs": 0, "stream": True}
        asked.append(body)
    return asked


async def answers(
    cluster: Cluster,
    asked: Sequence[dict[str, Any]],
    at_once: int,
    on_answer: Callable[[int], None] = lambda done: None,
) -> list[Stream]:
    """One stream for each request, `at_once` at a time. `on_answer` is told how many have ended."""
    streams, turns, done = [Stream() for _ in asked], asyncio.Semaphore(at_once), 0

    async def client(http: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> None:
        nonlocal done
        async with turns:
            try:
                await follow(http, cluster, body | {"model": cluster.model}, stream)
            except httpx.HTTPError as error:
                stream.error = repr(error)
        done += 1
        on_answer(done)

    async with httpx.AsyncClient(timeout=120) as http, asyncio.TaskGroup() as group:
        for body, stream in zip(asked, streams, strict=True):
            group.create_task(client(http, body, stream))
    return streams


@dataclass
class Books:
    """What became of all requests."""

    exact: int = 0
    wrong: Counter[str] = field(default_factory=Counter)  # answers that are not as they should be, by what they are
    same_scores: int = 0  # answers whose log probabilities are the same bits
    kills: Counter[str] = field(default_factory=Counter)
    counted: Counter[str] = field(default_factory=Counter)  # over all processes, also those that were killed

    def judge(self, streams: Sequence[Stream], expected: Sequence[Stream]) -> None:
        """Compares answers with what is right."""
        for stream, right in zip(streams, expected, strict=True):
            if stream.error is not None or stream.finish != "length":
                self.wrong[f"failed: {stream.error or stream.finish}"] += 1
            elif stream.tokens != right.tokens:
                self.wrong["other tokens"] += 1
            elif any(abs(one - two) > _SCORES for one, two in zip(stream.scores, right.scores, strict=True)):
                self.wrong["other log probabilities"] += 1
            else:
                self.exact += 1
                self.same_scores += stream.scores == right.scores

    def count(self, cluster: Cluster, **labels: str) -> None:
        """Books what processes have counted until now: those of a label, before they are killed, or all at the end."""
        for name, (metric, own) in _COUNTED.items():
            self.counted[name] += int(cluster.metric(metric, **own, **labels))


async def killing(cluster: Cluster, books: Books, due: "asyncio.Queue[bool]", victims: Sequence[str]) -> None:
    """Kills the next process in turn whenever that is due, the KV service while others wait for it."""
    members = await asyncio.to_thread(_members, cluster)
    while await due.get():
        name = victims[books.kills.total() % len(victims)]
        await asyncio.to_thread(books.count, cluster, worker=name)
        if name == "kv":
            os.kill(cluster.pids[name], signal.SIGSTOP)  # whoever wants something of it waits when it dies
            await asyncio.sleep(0.3)
        await asyncio.to_thread(kill, cluster, name)
        books.kills[name] += 1
        ends = time.monotonic() + 60
        while await asyncio.to_thread(_members, cluster) != members:
            if time.monotonic() > ends:
                raise RuntimeError("the cluster is not whole again")
            await asyncio.sleep(0.2)


def _members(cluster: Cluster) -> int:
    tiers = cluster.metric("tandem_tier_capacity_bytes", tier="disk") > 0
    return int(cluster.metric("tandem_router_workers")) if tiers else 0


async def under_fire(
    cluster: Cluster, asked: Sequence[dict[str, Any]], at_once: int, every: int, victims: Sequence[str]
) -> tuple[Books, list[Stream]]:
    """All requests, while a process is killed after every `every` answers."""
    books, due = Books(), asyncio.Queue[bool]()

    def on_answer(done: int) -> None:
        if done % every == 0:
            print(f"{done} answers, {books.kills.total()} kills", flush=True)
            due.put_nowait(True)

    killer = asyncio.create_task(killing(cluster, books, due, victims))
    streams = await answers(cluster, asked, at_once, on_answer)
    while not due.empty():
        due.get_nowait()
    due.put_nowait(False)
    await killer
    return books, streams


def start(folder: Path, *options: str) -> Cluster:
    """1 prefill and 2 decode workers with a tiny model in float32."""
    workers = ("--prefill", "1", "--decode", "2", "--threads", "1", "--dummy-seed", "5", "--local-prefill-tokens", "0")
    return start_cluster(folder, *workers, *options, model=str(tiny_model(folder / "tiny")))


def page(books: Books, options: argparse.Namespace, seconds: float) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    wrong = "".join(f"| {what} | {count} |\n" for what, count in books.wrong.items())
    kills = ", ".join(f"{name} {count}" for name, count in sorted(books.kills.items()))
    failed = sum(count for what, count in books.wrong.items() if what.startswith("failed"))
    counted = books.counted
    return f"""# Restored, preempted and killed: the same tokens

`make restore ARGS="{" ".join(sys.argv[1:])}"` at commit {commit}: {seconds:.0f} s, {os.cpu_count()} cores of
{cpu.partition(": ")[2]}, load average {os.getloadavg()[0]:.1f} at the end.

{options.requests} requests over HTTP, {options.at_once} at a time, about {options.documents} texts of 100 to
600 tokens, each with an ending of its own; 40 to 199 tokens of answer, half of them sampled. 1 prefill and 2
decode workers with a tiny model in float32 (3 layers, random weights) have {options.blocks} blocks of 16 tokens
each, and the KV service 4 MiB of host memory (341 blocks) over a disk. After every {options.every} answers a
process gets SIGKILL, the KV service while transfers wait for it. Each answer is compared with that of a cluster
without a KV service, with room for everything, in which nothing is killed.

| | |
|---|---:|
| requests | {options.requests} |
| with the same tokens, and log probabilities within {_SCORES:g} | {books.exact} |
| with the same bits of log probabilities | {books.same_scores} |
| with wrong tokens or scores | {books.wrong.total() - failed} |
| failed | {failed} |
| kills | {books.kills.total()} ({kills}) |
| preemptions | {counted["preemptions"]} |
| prompt tokens restored from the KV service | {counted["restored"]} |
| blocks of them read from disk before | {counted["from disk"]} |
| prompt tokens fetched from other workers | {counted["fetched"]} |
| prompt tokens computed | {counted["computed"]} |
| blocks evicted from the service's host memory | {counted["evicted"]} |
{wrong}
What a process counted in its last milliseconds before it was killed is missing in the lines about tokens and blocks.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--documents", type=int, default=25)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    asked = questions(options.requests, options.documents, options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = start(folder / "plain", "--kv-memory", "512MiB")
        try:
            expected = asyncio.run(answers(plain, asked, options.at_once))
        finally:
            stop_cluster(plain)
        if failed := [stream.error for stream in expected if stream.finish != "length"]:
            raise RuntimeError(f"not even without a fault all requests end: {failed[:3]}")
        print(f"{len(expected)} answers are known", flush=True)
        tiers = ("--fetch-tokens", "64", "--kv-memory-host", "4MiB", "--kv-disk", f"{folder / 'kept'}:64MiB")
        cluster = start(folder / "tiers", "--kv-blocks", str(options.blocks), *tiers)
        try:
            books, streams = asyncio.run(under_fire(cluster, asked, options.at_once, options.every, _VICTIMS))
            books.count(cluster)
            books.judge(streams, expected)
            cluster.wait_idle()
            if books.wrong:
                _FAILURE.write_text(cluster.log.read_text())
        except BaseException:
            _FAILURE.write_text(cluster.log.read_text())
            raise
        finally:
            stop_cluster(cluster)
    text = page(books, options, time.monotonic() - started)
    print(text)
    if options.record is not None:
        options.record.write_text(text)
    sys.exit(0 if books.exact == options.requests and books.counted["restored"] and books.counted["preemptions"] else 1)


if __name__ == "__main__":
    main()
