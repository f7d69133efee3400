"""Disaggregated against aggregated on the same CPU cores, over HTTP: `python -m bench.cpu_cluster --json F`.

Both are whole clusters started by `tandem up` on the default model: one aggregated worker with all threads, and one
prefill and one decode worker with half of them each. The same requests (32 of 128 tokens in, 64 out, greedy, no end of
sequence, no shared prefix) go to both in alternating rounds.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = {"aggregated": ("--aggregated", "1"), "disaggregated": ("--prefill", "1", "--decode", "1")}


@dataclass
class Target:
    """A running cluster."""

    process: subprocess.Popen[str]
    port: int
    model: str

    def complete(self, prompt: list[int], max_tokens: int) -> tuple[float, float]:
        """(seconds to the first token, seconds in all) of one streamed request."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        started = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        first = 0.0
        for line in response:
            if line.startswith(b"data:") and not first:
                first = time.perf_counter() - started
            if line.strip() == b"data: [DONE]":
                return first, time.perf_counter() - started
        raise RuntimeError("the stream ended without [DONE]")

    def stop(self) -> None:
        """Ends the cluster."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=20)


def start(way: str, threads: int) -> Target:
    """Starts a cluster and waits until it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "services.cli", "up", "--json", "--port", str(port), *WAYS[way]]
    process = subprocess.Popen(
        [*command, "--threads", str(threads)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            return Target(process, port, event["model"])
    raise RuntimeError("the cluster did not start; run `tandem up` to see why")


def one_round(target: Target, seed: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Sends all requests at once."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 49_000) for _ in range(arguments.input_tokens)] for _ in range(arguments.requests)]
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(arguments.requests) as pool:
        times = list(pool.map(lambda prompt: target.complete(prompt, arguments.output_tokens), prompts))
    seconds = time.perf_counter() - started
    return {
        "tok_s": arguments.requests * arguments.output_tokens / seconds,
        "ttft_p50_s": statistics.median(first for first, _ in times),
        "tpot_p50_ms": 1e3 * statistics.median((last - first) / (arguments.output_tokens - 1) for first, last in times),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the report")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="compute threads of each cluster")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args()
    targets = {
        "aggregated": start("aggregated", arguments.threads),
        "disaggregated": start("disaggregated", max(1, arguments.threads // 2)),
    }
    results: dict[str, list[dict[str, float]]] = {way: [] for way in targets}
    try:
        for number in range(arguments.rounds + 1):
            for way, target in targets.items():
                result = one_round(target, number, arguments)
                print(
                    f"round {number}{' (warm-up)' if number == 0 else ''}: {way} {result['tok_s']:.1f} tok/s",
                    flush=True,
                )
                if number:
                    results[way].append(result)
    finally:
        for target in targets.values():
            target.stop()
    pairs = zip(results["disaggregated"], results["aggregated"], strict=True)
    report: dict[str, Any] = {
        "requests": arguments.requests,
        "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "ratio_disaggregated_to_aggregated": statistics.median(d["tok_s"] / a["tok_s"] for d, a in pairs),
    }
    for way, rounds in results.items():
        report[way] = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
