"""A cluster of a benchmark's own, started by `tandem up`, and what one request to it took."""

import argparse
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_OUTPUT = 8  # tokens, compared
_SCORES = 1e-3  # that log probabilities may differ: other chunks of a prompt, other last bits
_WAIT_SECONDS = 120.0
_LABEL = re.compile(r'(\w+)="([^"]*)"')


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
    from_tier: int = 0  # tokens of the prompt that came from where they were looked for
    asked: bool = False  # whether the router had them fetched

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
    on_device: bool  # then answers have no log probabilities: steps with them are slow there
    restarts: list[dict[str, Any]] = field(default_factory=list)

    def complete(self, prompt: list[int], max_tokens: int = _OUTPUT, salt: str = "") -> Answer:
        """One streamed request. Prompts of another salt share no cache."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if not self.on_device:
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
                if self.on_device:
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

    def _samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each."""
        connection = http.client.HTTPConnection(urlsplit(self.admin).netloc, timeout=10)
        connection.request("GET", "/metrics")
        for line in connection.getresponse().read().decode().splitlines():
            sample, _, value = line.rpartition(" ")
            of, _, rest = sample.partition("{")
            if of == name:
                yield dict(_LABEL.findall(rest)), float(value)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name whose labels match."""
        return sum(value for own, value in self._samples(name) if labels.items() <= own.items())

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The same for each value of a label, of those that are not 0."""
        totals: dict[str, float] = {}
        for own, value in self._samples(name):
            totals[own[label]] = totals.get(own[label], 0.0) + value
        return {of: total for of, total in totals.items() if total}

    def wait(self, name: str, least: float, **labels: str) -> None:
        """Until a metric is so high. Raises RuntimeError."""
        ends = time.monotonic() + _WAIT_SECONDS
        while (value := self.metric(name, **labels)) < least:
            if time.monotonic() > ends:
                raise RuntimeError(f"{name} is {value} after {_WAIT_SECONDS:.0f} s, not {least}")
            time.sleep(0.1)

    def settle(self) -> None:
        """Until the router hears of no more blocks; heartbeats, which tell rates, have come then, too."""
        ends, before = time.monotonic() + _WAIT_SECONDS, -1.0
        while (blocks := self.metric("tandem_router_index_blocks")) != before:
            if time.monotonic() > ends:
                raise RuntimeError(f"the router hears of more and more blocks for {_WAIT_SECONDS:.0f} s")
            before = blocks
            time.sleep(1.0)

    def forget(self) -> None:
        """Empties the worker's cache."""
        for command in ("sleep", "wake"):
            subprocess.run(
                [sys.executable, "-m", "services.cli", command, "--url", self.url], check=True, capture_output=True
            )
        time.sleep(1.0)  # heartbeats

    def kill_service(self, blocks: int, tier: str) -> None:
        """Ends the KV service; its successor has found so many blocks in a tier, and the router knows."""
        known = len(self.restarts)
        os.kill(self.pids["kv"], signal.SIGKILL)
        ends = time.monotonic() + _WAIT_SECONDS
        while len(self.restarts) == known:
            if time.monotonic() > ends:
                raise RuntimeError(f"the KV service was not started again within {_WAIT_SECONDS:.0f} s")
            time.sleep(0.1)
        self.pids["kv"] = self.restarts[-1]["pid"]
        self.wait("tandem_tier_blocks", blocks, tier=tier)
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

    def close(self) -> None:
        """Ends the cluster."""
        if "kv" in self.pids:
            os.kill(self.pids["kv"], signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def service(folder: Path, arguments: argparse.Namespace, disk: bool = True) -> list[str]:
    """Flags of `tandem up` for a KV service whose disk, if it has one, is in `folder`."""
    of_disk = ["--kv-disk", f"{folder}:{arguments.kv_disk}"] if disk else []
    return ["--kv-memory-host", arguments.kv_memory_host, *of_disk]


def start(folder: Path, arguments: argparse.Namespace, *flags: str) -> Target:
    """Starts the cluster with these flags, and those that the arguments name, and waits until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(port), "--admin-port", "0"]
    command += [*flags, "--threads", str(arguments.threads), "--device", arguments.device]
    for flag in ("model", "dummy_seed", "max_model_len", "kv_memory"):
        if (value := getattr(arguments, flag)) is not None:
            command += [f"--{flag.replace('_', '-')}", str(value)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=(arguments.log or folder / "log").open("a"),
        text=True,
        env={"TANDEM_CLUSTER_KEY": secrets.token_hex(32)} | os.environ,  # what Redis has is sealed with it
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            target = Target(
                process, event["url"], event["admin"], event["model"], event["pids"], arguments.device != "cpu"
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
