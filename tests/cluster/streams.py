"""Many streams at once over HTTP, with the time of every token, and what a killed worker does to them."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from cluster.harness import Cluster
from faults_hit import FaultMissed, must_hit


@dataclass
class Stream:
    """What one client has seen."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log probability of each
    times: list[float] = field(default_factory=list)  # when each token came, time.monotonic()
    finish: str | None = None
    error: str | None = None

    @property
    def gap(self) -> float:
        """Longest time between two tokens, seconds."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


def body(model: str, number: int, max_tokens: int) -> dict[str, Any]:
    """Request `number`: greedy or sampled, and with a prompt that shares nothing with the others."""
    return {
        "model": model,
        "prompt": [(37 * number + 11 * i) % 40_000 + 10 for i in range(60 + number % 50)],
        "max_tokens": max_tokens,
        "temperature": 0.9 if number % 2 else 0,
        "seed": number,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
    }


async def follow(http: httpx.AsyncClient, cluster: Cluster, request: dict[str, Any], stream: Stream) -> None:
    """Asks for a stream with log probabilities, and notes what comes."""
    async with http.stream("POST", cluster.url + "/v1/completions", json=request) as response:
        if response.status_code != 200:
            stream.error = (await response.aread()).decode()
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                stream.error = str(event["error"])
                return
            for choice in event["choices"]:
                new = choice["logprobs"]["tokens"] if choice["logprobs"] else []
                stream.tokens += new
                stream.scores += choice["logprobs"]["token_logprobs"] if new else []
                stream.times += [time.monotonic()] * len(new)
                stream.finish = choice["finish_reason"] or stream.finish


async def run_streams(
    cluster: Cluster, numbers: range, max_tokens: int, in_the_middle: Callable[[], None] | None = None
) -> list[Stream]:
    """One stream for each number, all at once. `in_the_middle` is called when each has tokens and none has all."""
    streams = [Stream() for _ in numbers]

    async def disturb(call: Callable[[], None]) -> None:
        while not all(stream.tokens or stream.error for stream in streams):
            await asyncio.sleep(0.005)
        must_hit(not any(stream.finish for stream in streams), "a stream ended before the fault")
        await asyncio.to_thread(call)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        async with httpx.AsyncClient(limits=limits, timeout=120) as http, asyncio.TaskGroup() as group:
            if in_the_middle is not None:
                group.create_task(disturb(in_the_middle))
            for number, stream in zip(numbers, streams, strict=True):
                group.create_task(follow(http, cluster, body(cluster.model, number, max_tokens), stream))
    except* FaultMissed as missed:
        raise FaultMissed(str(missed.exceptions[0])) from None
    return streams


def kill(cluster: Cluster, name: str) -> None:
    """SIGKILL, proved by the supervisor's word that the process has been started again."""
    os.kill(cluster.pids[name], signal.SIGKILL)
    event = cluster.wait_event("restarted", 120)
    assert event["name"] == name
    cluster.pids[name] = int(str(event["pid"]))
