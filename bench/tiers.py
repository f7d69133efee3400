"""Prefixes that come back from the KV service against computing them again: `python -m bench.tiers [--quick] --json F`.

One aggregated worker, with the default model on CPU or any with `--model`, and the KV service with host memory and a
disk, all started by `tandem up`. Each prompt is sent when nobody has it (computed); once host memory has it and the
worker has forgotten it, and again at once (cached); when the service was killed, so that only the disk has it, whose
file the kernel was told to forget (disk); and the same with the file in the kernel's memory (page_cache). All are
greedy. What is compared is the time to the first token over HTTP, medians over rounds. The bytes of a prefix over what
a tier takes longer than the worker's own cache are held against the medium's limit (`tier_limits`). What was not
restored was computed, as that was believed to be quicker: it counts with what it took.

On CPU the worker forgets by `tandem sleep` and `tandem wake`. With `--device cuda` it has room for less than one
round's prompts (`--kv-memory`), so that each round makes it forget the others: two are needed.

With `--background`: what it costs streams that the KV service copies what is computed. A prefill and a decode worker
answer the same load again and again, in turns while the service copies and while it is stopped (SIGSTOP); what is
compared is the time for each token after the first, and what is told is the ratio of each pair of turns.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench import tier_limits

_BLOCK = 16  # tokens
_OUTPUT = 8  # tokens, compared
_SCORES = 1e-3  # that log probabilities may differ: other chunks of a prompt, other last bits
_WAIT_SECONDS = 120.0
_PINNED_SECONDS = 20.0
_STREAMS, _PROMPT, _ANSWER = 4, 512, 128  # of a turn with `--background`; tokens
LENGTHS, QUICK_LENGTHS, CUDA_LENGTHS = (1024, 4096, 8000), (1024, 4096), (1024, 4096, 8192, 32768)
TIERS = {"host": "host", "disk": "disk", "page_cache": "disk"}  # to the service's name of it
LIMITS = {"host": "host_to_device", "disk": "disk", "page_cache": "page_cache"}


@dataclass
class Answer:
    """What came of one request."""

    ttft: float  # seconds
    cached: int  # tokens of the prompt
    tokens: list[str]
    scores: list[float]
    ended: float = 0.0  # seconds after it was asked
    gap: float = 0.0  # longest between two tokens, seconds
    count: int = 0  # tokens that came
    from_tier: int = 0  # tokens of the prompt

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        return (self.ended - self.ttft) / (self.count - 1)

    def equals(self, other: "Answer") -> bool:
        """Whether the tokens are the same, and their log probabilities within rounding."""
        pairs = zip(self.scores, other.scores, strict=True)
        close = all(abs(one - two) <= _SCORES for one, two in pairs)
        return "".join(self.tokens) == "".join(other.tokens) and close


@dataclass
class Target:
    """A running cluster."""

    process: subprocess.Popen[str]
    url: str
    admin: str
    model: str
    pids: dict[str, int]
    scores: bool  # whether answers have log probabilities
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def complete(self, prompt: list[int], max_tokens: int = _OUTPUT, salt: str = "") -> Answer:
        """One streamed request. Prompts of another salt share no cache."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if self.scores:  # on a device steps with them are slow
            body["logprobs"] = 0
        body |= {"cache_salt": salt} if salt else {}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=600)
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        answer = Answer(0.0, 0, [], [])
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            answer.ttft = answer.ttft or time.perf_counter() - started
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                now = time.perf_counter() - started
                answer.gap = max(answer.gap, now - answer.ended) if answer.ended else 0.0
                answer.ended = now
                if not self.scores:
                    answer.tokens.append(choice["text"])
                elif choice.get("logprobs"):
                    answer.tokens += choice["logprobs"]["tokens"]
                    answer.scores += choice["logprobs"]["token_logprobs"]
            if usage := chunk.get("usage"):
                answer.count = usage["completion_tokens"]
                answer.cached = usage["prompt_tokens_details"]["cached_tokens"]
        if answer.count != max_tokens:
            raise RuntimeError(f"{answer.count} tokens came instead of {max_tokens}")
        return answer

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels match."""
        connection = http.client.HTTPConnection(urlsplit(self.admin).netloc, timeout=10)
        connection.request("GET", "/metrics")
        total = 0.0
        for line in connection.getresponse().read().decode().splitlines():
            sample, _, value = line.rpartition(" ")
            of, _, rest = sample.partition("{")
            if of == name and all(f'{key}="{wanted}"' in rest for key, wanted in labels.items()):
                total += float(value)
        return total

    def wait(self, name: str, least: float, **labels: str) -> None:
        """Until a metric is so high. Raises RuntimeError."""
        ends = time.monotonic() + _WAIT_SECONDS
        while (value := self.metric(name, **labels)) < least:
            if time.monotonic() > ends:
                raise RuntimeError(f"{name} is {value} after {_WAIT_SECONDS:.0f} s, not {least}")
            time.sleep(0.1)

    def forget(self) -> None:
        """Empties the worker's cache."""
        for command in ("sleep", "wake"):
            subprocess.run(
                [sys.executable, "-m", "services.cli", command, "--url", self.url], check=True, capture_output=True
            )
        time.sleep(1.0)  # heartbeats

    def kill_service(self, blocks: int) -> None:
        """Ends the KV service; its successor has found so many blocks on disk, and the router knows."""
        known = len(self.restarts)
        os.kill(self.pids["kv"], signal.SIGKILL)
        ends = time.monotonic() + _WAIT_SECONDS
        while len(self.restarts) == known:
            if time.monotonic() > ends:
                raise RuntimeError(f"the KV service was not started again within {_WAIT_SECONDS:.0f} s")
            time.sleep(0.1)
        self.pids["kv"] = self.restarts[-1]["pid"]
        self.wait("tandem_tier_blocks", blocks, tier="disk")
        self.wait("tandem_router_index_blocks", blocks)
        time.sleep(3.0)  # the lease of the one that is gone

    def copies(self, wanted: bool) -> None:
        """Whether the KV service copies what is computed from now on; what it lacks then it has copied before."""
        os.kill(self.pids["kv"], signal.SIGCONT if wanted else signal.SIGSTOP)
        time.sleep(4.0)  # more than a lease
        if wanted:
            self.wait("tandem_tier_capacity_bytes", 1, tier="host")
            ends = time.monotonic() + _WAIT_SECONDS
            before = -1.0
            while (kept := self.metric("tandem_tier_stored_blocks_total", tier="host")) != before:
                if time.monotonic() > ends:
                    raise RuntimeError("the KV service does not come to an end with what it lacks")
                before = kept
                time.sleep(1.0)

    def stop(self) -> None:
        """Ends the cluster."""
        os.kill(self.pids["kv"], signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=20)


def start(folder: Path, arguments: argparse.Namespace, *workers: str) -> Target:
    """Starts the cluster and waits until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(port), "--admin-port", "0"]
    command += [*workers, "--threads", str(arguments.threads), "--device", arguments.device]
    command += ["--kv-memory-host", arguments.kv_memory_host, "--kv-disk", f"{folder}:{arguments.kv_disk}"]
    for flag in ("model", "dummy_seed", "max_model_len", "kv_memory"):
        if (value := getattr(arguments, flag)) is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=(arguments.log or folder / "log").open("w"), text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            target = Target(
                process, event["url"], event["admin"], event["model"], event["pids"], arguments.device == "cpu"
            )
            threading.Thread(target=_follow, args=(target,), daemon=True).start()
            return target
    raise RuntimeError("the cluster did not start; run `tandem up` to see why")


def _follow(target: Target) -> None:
    assert target.process.stdout is not None
    for line in target.process.stdout:
        event = json.loads(line)
        if event["event"] == "restarted":
            target.restarts.append(event)


def restore(target: Target, prompt: list[int], tier: str) -> Answer:
    """What comes of a prompt that only this tier has."""
    before = target.metric("tandem_tier_hit_blocks_total", tier=TIERS[tier])
    answer = target.complete(prompt)
    hits = target.metric("tandem_tier_hit_blocks_total", tier=TIERS[tier]) - before
    if answer.cached and not hits:
        raise RuntimeError(f"{answer.cached} tokens came, but not from {tier}")
    answer.from_tier = int(hits) * _BLOCK if answer.cached else 0
    return answer


def is_exact(answers: Sequence[dict[str, Answer]], like: str) -> bool:
    """Whether each tier has restored a prompt, and all that was restored gave the answer of `like`."""
    restored = [(ways[like], ways[tier]) for ways in answers for tier in TIERS if ways[tier].from_tier]
    by_each = all(any(ways[tier].from_tier for ways in answers) for tier in TIERS)
    return by_each and all(wanted.equals(answer) for wanted, answer in restored)


def summary(rounds: list[dict[int, dict[str, Answer]]], kv_bytes: float, limits: dict[str, float]) -> dict[str, Any]:
    """Of all rounds. `kv_bytes`: of one token. `limits`: of media, in bytes per second."""
    lengths: dict[str, Any] = {}
    for length in rounds[0]:
        seconds = {way: statistics.median(answers[length][way].ttft for answers in rounds) for way in rounds[0][length]}
        row: dict[str, Any] = {f"{way}_ttft_s": value for way, value in seconds.items()}
        for tier in TIERS:
            row[f"{tier}_speedup"] = seconds["computed"] / seconds[tier]
            row[f"{tier}_restored"] = statistics.mean(answers[length][tier].from_tier / length for answers in rounds)
            if row[f"{tier}_restored"] > 0.5:
                longer = max(1e-9, seconds[tier] - seconds["cached"])
                row[f"{tier}_bytes_per_s"] = rate = length * kv_bytes / longer
                if (limit := limits.get(LIMITS[tier])) is not None:
                    row[f"{tier}_of_limit"] = rate / limit
        lengths[str(length)] = row
    longest = lengths["8192" if "8192" in lengths else max(lengths, key=int)]
    return {
        "host_speedup": longest["host_speedup"],
        "disk_speedup": longest["disk_speedup"],
        "page_cache_speedup": longest["page_cache_speedup"],
        "lengths": lengths,
        "limits_bytes_per_s": limits,
    }


def turn(target: Target, rng: random.Random) -> list[float]:
    """Seconds for each token after the first, of streams that begin at once with prompts that nobody has seen."""
    prompts = [[rng.randrange(3, 49_000) for _ in range(_PROMPT)] for _ in range(_STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        return [answer.tpot for answer in pool.map(target.complete, prompts, [_ANSWER] * _STREAMS)]


def keep_apart(target: Target) -> None:
    """Gives the decode worker the last of this process's cores, and all others what is left."""
    *others, last = sorted(os.sched_getaffinity(0))
    for name, pid in target.pids.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), [last] if name == "decode-0" else others)
    os.sched_setaffinity(0, others)


def background(target: Target, rounds: int, rng: random.Random) -> dict[str, Any]:
    """What copying costs streams: ratios of turns with it to turns without."""
    turn(target, rng)
    pairs, copied = [], 0.0
    for number in range(rounds):
        seconds = {}
        for copies in (True, False) if number % 2 else (False, True):
            target.copies(copies)
            before = target.metric("tandem_tier_stored_blocks_total", tier="host") if copies else 0.0
            seconds[copies] = statistics.median(turn(target, rng))
            copied += target.metric("tandem_tier_stored_blocks_total", tier="host") - before if copies else 0.0
        pairs.append(seconds)
        print(f"round {number}: {1e3 * seconds[True]:.2f} ms a token, {1e3 * seconds[False]:.2f} without", flush=True)
    ratios = sorted(seconds[True] / seconds[False] for seconds in pairs)
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
    return {
        "background_ratio": median,
        "background_ratio_quartiles": [low, high],
        "background_ratios": ratios,
        "tpot_copying_s": statistics.median(seconds[True] for seconds in pairs),
        "tpot_stopped_s": statistics.median(seconds[False] for seconds in pairs),
        "copied_blocks_a_turn": copied / rounds,
        "streams": _STREAMS,
        "prompt_tokens": _PROMPT,
        "answer_tokens": _ANSWER,
    }


def restored(
    target: Target, lengths: Sequence[int], count: int, rng: random.Random, folder: Path, device: str
) -> dict[str, Any]:
    """Time to the first token, computed and restored."""
    warm = [rng.randrange(3, 49_000) for _ in range(512)]  # what goes before what is measured
    target.complete(warm)
    prompts = [{length: [rng.randrange(3, 49_000) for _ in range(length)] for length in lengths} for _ in range(count)]
    rounds: list[dict[int, dict[str, Answer]]] = [defaultdict(dict) for _ in range(count)]
    blocks = 512 // _BLOCK
    for number, of_round in enumerate(prompts):
        for length, prompt in of_round.items():
            rounds[number][length]["computed"] = answer = target.complete(prompt)
            rounds[number][length]["cached"] = again = target.complete(prompt)
            blocks += length // _BLOCK
            started = time.perf_counter()
            target.wait("tandem_tier_blocks", blocks, tier="host")  # before the worker has no room for it any more
            kept = time.perf_counter() - started
            told = f"computed {1e3 * answer.ttft:.1f} ms, cached {1e3 * again.ttft:.1f} ms, kept {kept:.1f} s later"
            print(f"round {number}: {length} tokens: {told}", flush=True)
    target.wait("tandem_tier_blocks", blocks, tier="disk")
    for tier in TIERS:
        if TIERS[tier] == "disk":
            if tier == "disk":
                for file in folder.glob("*.blocks"):
                    tier_limits.forget(file)
            target.kill_service(blocks)
        if device == "cpu":
            target.forget()
        target.complete(warm)  # so the two are linked, and shared memory is being pinned
        if device == "cuda":
            time.sleep(_PINNED_SECONDS)  # until it is
        for number, of_round in enumerate(prompts):
            for length, prompt in of_round.items():
                rounds[number][length][tier] = answer = restore(target, prompt, tier)
                told = f"{tier} {1e3 * answer.ttft:.1f} ms, {answer.from_tier} restored"
                print(f"round {number}: {length} tokens: {told}", flush=True)
    kept = target.metric("tandem_tier_bytes", tier="disk") / target.metric("tandem_tier_blocks", tier="disk")
    # On a device other steps give other last bits: there an answer is compared with that of the worker's own cache.
    like = "computed" if device == "cpu" else "cached"
    exact = is_exact([ways for each in rounds for ways in each.values()], like)
    limits = tier_limits.of_disk(folder) | (tier_limits.to_device() if device == "cuda" else {})
    told_of = {"kv_bytes_per_token": kept / _BLOCK, "token_exact": exact}
    return told_of | summary(rounds, kept / _BLOCK, limits)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round (with --background two), up to 4,096 tokens")
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of the worker")
    parser.add_argument("--rounds", type=int, help="default 3, with --background 10")
    parser.add_argument("--background", action="store_true", help="what it costs streams that blocks are copied")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="with --background: the decode worker has a core that nobody else computes on",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the workers compute")
    parser.add_argument("--model", help="as for tandem up; default: its own")
    parser.add_argument("--dummy-seed", type=int, help="random weights, for a model's folder that has none")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--kv-memory", help="of a worker, as 5GiB; with --device cuda less than a round of prompts")
    parser.add_argument("--kv-memory-host", default="2GiB", help="of the KV service: more than all rounds' prompts")
    parser.add_argument("--kv-disk", default="4GiB", help="the same")
    parser.add_argument("--log", type=Path, help="where to leave the cluster's log")
    parser.add_argument("--lengths", type=int, nargs="+", help="of prefixes, in tokens")
    arguments = parser.parse_args()
    usual = (2 if arguments.quick else 10) if arguments.background else 1 if arguments.quick else 3
    least = 2 if arguments.device == "cuda" and not arguments.background else 1
    count, rng = arguments.rounds or max(least, usual), random.Random(1)
    if count < least:
        parser.error("--device cuda needs --rounds 2 or more: one round makes the worker forget the other")
    workers = ("--prefill", "1", "--decode", "1") if arguments.background else ("--aggregated", "1")
    lengths = QUICK_LENGTHS if arguments.quick else LENGTHS if arguments.device == "cpu" else CUDA_LENGTHS
    with tempfile.TemporaryDirectory(prefix="tandem-tiers-") as folder:
        target = start(Path(folder), arguments, *workers)
        try:
            if arguments.background:
                if arguments.apart:
                    keep_apart(target)
                found = background(target, count, rng)
            else:
                of = arguments.lengths or lengths
                found = restored(target, of, count, rng, Path(folder), arguments.device)
        finally:
            target.stop()
    made = {"model": target.model, "device": arguments.device, "threads": arguments.threads, "rounds": count}
    report = made | {"cpu": platform.processor()} | found
    print(json.dumps(report, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
