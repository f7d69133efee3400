"""`make kill`: decode workers are killed under streams by the hundred, and what became of the streams, as a page."""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cluster.harness import Cluster, start_cluster, stop_cluster
from cluster.streams import Stream, kill, run_streams
from cluster.tiny import tiny_model

_FAILURE = Path("kill-failure.log")  # what the processes of a cluster logged whose streams did not all go on


@dataclass
class Books:
    """All rounds together."""

    streams: int = 0
    exact: int = 0
    moved: int = 0
    kills: int = 0
    orphaned: int = 0  # KV blocks, over all workers, when all was quiet again
    wrong: Counter[str] = field(default_factory=Counter)  # streams that did not go on, by what became of them
    gaps: list[float] = field(default_factory=list)  # longest gap of each stream in a round with a kill, seconds
    quiet_gaps: list[float] = field(default_factory=list)  # the same without one

    def judge(self, streams: list[Stream], expected: list[list[str]]) -> None:
        """Books one round."""
        for stream, tokens in zip(streams, expected, strict=True):
            self.streams += 1
            self.gaps.append(stream.gap)
            if stream.error is None and stream.finish == "length" and stream.tokens == tokens:
                self.exact += 1
            else:
                self.wrong[stream.error or f"{stream.finish}, {len(stream.tokens)} tokens"] += 1


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def wait_whole(cluster: Cluster, workers: int) -> None:
    deadline = time.monotonic() + 60
    while cluster.metric("tandem_router_workers") != workers:
        if time.monotonic() > deadline:
            raise RuntimeError("the cluster is not whole again")
        time.sleep(0.2)


async def rounds(cluster: Cluster, options: argparse.Namespace) -> Books:
    """The same requests in every round: first without a fault, then with a kill when all streams are under way."""
    books, dice = Books(), random.Random(options.seed)
    numbers = range(options.at_once)
    quiet = await run_streams(cluster, numbers, options.tokens)
    expected = [stream.tokens for stream in quiet]
    books.quiet_gaps = [stream.gap for stream in quiet]
    if not all(len(tokens) == options.tokens for tokens in expected):
        raise RuntimeError(f"not even without a fault all streams end: {[s.error for s in quiet if s.error][:3]}")
    while books.streams < options.streams:
        await asyncio.to_thread(cluster.wait_idle, 20)
        victim = dice.choice(("decode-0", "decode-1"))
        before = cluster.metric("tandem_requests_moved_total")
        books.judge(await run_streams(cluster, numbers, options.tokens, partial(kill, cluster, victim)), expected)
        books.kills += 1
        await asyncio.to_thread(wait_whole, cluster, 3)
        await asyncio.to_thread(cluster.wait_idle, 20)
        books.orphaned += int(cluster.metric("tandem_kv_blocks_orphaned"))
        books.moved += int(cluster.metric("tandem_requests_moved_total") - before)
        print(f"{books.streams} streams, {books.exact} exact, {books.moved} moved: {victim} was killed", flush=True)
    return books


def page(books: Books, options: argparse.Namespace, seconds: float) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    load = os.getloadavg()[0]
    wrong = "".join(f"| {what} | {count} |\n" for what, count in books.wrong.items())
    return f"""# Decode workers killed under streams

`make kill ARGS="{" ".join(sys.argv[1:])}"` at commit {commit}: {seconds:.0f} s, {os.cpu_count()} cores of
{cpu.partition(": ")[2]}, load average {load:.1f} at the end.

1 prefill and 2 decode workers serve a tiny model in float32 (3 layers, random weights). {options.at_once} streams at
once over HTTP, {options.tokens} tokens each, every second one sampled. When all are under way and none has ended, one
decode worker gets SIGKILL; its streams go on at the other one, and the supervisor starts it again. Each stream is
compared with the same request in a round without a fault.

| | |
|---|---:|
| streams under way at a kill | {books.streams} |
| of them token-exact and complete | {books.exact} |
| kills | {books.kills} |
| streams that moved to the other worker | {books.moved} |
| orphaned KV blocks afterwards | {books.orphaned} |
| longest gap between two tokens of a stream, p50, s | {percentile(books.gaps, 0.5):.2f} |
| p99, s | {percentile(books.gaps, 0.99):.2f} |
| largest, s | {max(books.gaps):.2f} |
| the same without a kill, p99, s | {percentile(books.quiet_gaps, 0.99):.2f} |
{wrong}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=800)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(tiny_model(folder / "tiny"))
        workers = ("--prefill", "1", "--decode", "2", "--threads", "1")
        room = ("--kv-memory", "512MiB", "--max-running", "1024")
        cluster = start_cluster(
            folder, *workers, *room, "--dummy-seed", "5", "--local-prefill-tokens", "0", model=model
        )
        try:
            books = asyncio.run(rounds(cluster, options))
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
    sys.exit(0 if books.exact == books.streams and not books.orphaned else 1)


if __name__ == "__main__":
    main()
