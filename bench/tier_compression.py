"""What packing blocks for Redis gains: `python -m bench.tier_compression --server valkey-server --json F`.

The default model computes prose in float32 and bfloat16. Its KV blocks go through what `kv_compression` does, on one
core, whose clock counts, with the seal that they get anyway; each block is compared bit by bit. With `--server` they
are then put into a Redis and got back over a loopback that `tc` holds to each of the rates, with and without, in turn;
that needs a network namespace of its own (`sudo unshare --net`).

For comparison, what is not built: eight bits a number, with a scale for each block, layer, head, and K or V. Its cost
is told in the model's own words: the text goes on behind a prefix whose KV was rounded, and the next token's log
probabilities are compared with those behind the exact KV.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis.asyncio
import torch

from bench.kv_codec import _PROSE, compute, limit
from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCacheSpec
from engine.request import Request, SamplingParams, TokenLogprob
from engine.text.tokenizer import Tokenizer
from engine.weights.resolve import resolve
from kv_transfer.tiers.redis_store import RedisStore
from kv_transfer.tiers.seal import Seal
from kv_transfer.tiers.store import BlockFormat

_DTYPES = ("float32", "bfloat16")
_KEY = b"a cluster's key"
_PORT = 16399
_PATIENCE = 120.0  # seconds


def blocks_of(pages: torch.Tensor) -> list[memoryview]:
    """Each block's bytes."""
    return [page.contiguous().view(torch.uint8).flatten().numpy().data for page in pages]


def name_of(number: int) -> bytes:
    """A hash for a block."""
    return number.to_bytes(16, "big")


def measure_seal(format: BlockFormat, blocks: list[memoryview], codec: int, rounds: int) -> dict[str, float]:
    """Share of the bytes that is left, and MB a second of the core (unpacked bytes); the best of some rounds."""
    seal, into = Seal(format, _KEY, codec), memoryview(bytearray(format.block_bytes))
    total, closing, opening, size = sum(map(len, blocks)), [], [], 0
    for _ in range(rounds):
        started = time.process_time()
        values = [seal.close(name_of(at), block) for at, block in enumerate(blocks)]
        closing.append(time.process_time() - started)
        size, seconds = sum(map(len, values)), 0.0
        for at, value in enumerate(values):
            started = time.process_time()
            assert seal.open(name_of(at), memoryview(value), into)
            seconds += time.process_time() - started
            assert into == blocks[at], "bits were lost"
        opening.append(seconds)
    return {
        "share": size / total,
        "write_mb_per_s": total / min(closing) / 1e6,
        "read_mb_per_s": total / min(opening) / 1e6,
    }


async def measure_redis(
    format: BlockFormat, blocks: list[memoryview], codec: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of putting all blocks, and of getting them, plain and packed in turn."""
    hashes = [name_of(at) for at in range(len(blocks))]
    into = [memoryview(bytearray(format.block_bytes)) for _ in blocks]
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for way, used in (("off", 0), ("zstd", codec)):
            client = redis.asyncio.Redis(port=_PORT, socket_timeout=_PATIENCE)
            store = RedisStore(client, format, key=_KEY, codec=used)
            await client.flushall()
            started = time.monotonic()
            assert all(await store.put(hashes, blocks))
            found.setdefault(f"{way}_put", []).append(time.monotonic() - started)
            started = time.monotonic()
            assert all(await store.get(hashes, into))
            found.setdefault(f"{way}_get", []).append(time.monotonic() - started)
            assert into == blocks, "bits were lost"
            await store.close()
    return found


def int8(pages: torch.Tensor) -> torch.Tensor:
    """`pages` [blocks, L, page, heads, 2 * dim] after eight bits a number, scaled by head."""
    heads = pages.reshape(*pages.shape[:-1], 2, -1).float()
    scale = heads.abs().amax(dim=(2, -1), keepdim=True).clamp_min(1e-12) / 127
    return ((heads / scale).round().clamp(-127, 127) * scale).reshape(pages.shape).to(pages.dtype)


def fp8(pages: torch.Tensor) -> torch.Tensor:
    """The same in float8_e4m3, whose largest number is 448."""
    heads = pages.reshape(*pages.shape[:-1], 2, -1).float()
    scale = heads.abs().amax(dim=(2, -1), keepdim=True).clamp_min(1e-12) / 448
    return ((heads / scale).to(torch.float8_e4m3fn).float() * scale).reshape(pages.shape).to(pages.dtype)


def next_tokens(
    tokens: list[int], prefix: int, steps: int, round_kv: Callable[[torch.Tensor], torch.Tensor] | None
) -> list[TokenLogprob]:
    """What the model thinks comes next at each of `steps` places behind `prefix` tokens, whose KV may be rounded."""
    engine = Engine.build(resolve(), EngineConfig(num_blocks=len(tokens) // 16 + 64, threads=1))
    told: list[TokenLogprob] = []
    for step in range(-1, steps):
        name, length = f"step-{step}", prefix + 1 + max(step, 0)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
        engine.add(Request(request_id=name, prompt_token_ids=tokens[:length], sampling=sampling), hold=step < 0)
        while engine.has_work():
            for output in engine.step().outputs:
                if step >= 0 and output.logprobs:
                    told.append(output.logprobs[0])
        if step < 0:
            held = engine.held_blocks(name)[: prefix // engine.kv_cache.spec.block_size]
            if round_kv is not None:
                engine.kv_cache.tensor[held] = round_kv(engine.kv_cache.tensor[held])
            engine.release(name)
    return told


def measure_rounding(prefix: int, steps: int) -> dict[str, dict[str, float]]:
    """By format: how often the best next token is the same, and how far its log probability is off."""
    tokens = Tokenizer.from_folder(resolve()).encode_plain(_PROSE.read_text())[: prefix + steps + 1]
    exact = next_tokens(tokens, prefix, steps, None)
    found = {}
    for name, way in (("int8", int8), ("fp8", fp8)):
        rounded = next_tokens(tokens, prefix, steps, way)
        pairs = list(zip(exact, rounded, strict=True))
        off = [abs(left.logprob - dict(right.top).get(left.token_id, -99.0)) for left, right in pairs]
        found[name] = {
            "same_best": statistics.mean(left.token_id == right.token_id for left, right in pairs),
            "mean_logprob_off": statistics.mean(off),
            "largest_logprob_off": max(off),
        }
    return found


def measure_int8(spec: KVCacheSpec, pages: torch.Tensor, rounds: int) -> dict[str, float]:
    """Share that eight bits and a scale take, and MB a second of the core for rounding there and back."""
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        for page in pages:
            int8(page[None])
        seconds.append(time.process_time() - started)
    share = 1 / spec.dtype.itemsize + 4 / (spec.block_size * spec.head_dim * spec.dtype.itemsize)
    return {"share": share, "round_trip_mb_per_s": pages.nbytes / min(seconds) / 1e6}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="Redis or Valkey server to start")
    parser.add_argument("--rates", default="100mbit,1gbit,none", help="as tc names them; none: no limit")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=128, help="tokens behind a rounded prefix")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.server and [name for _, name in socket.if_nameindex()] != ["lo"]:
        parser.error("this would slow down the machine's own loopback: run it under `unshare --net`")
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "command": "python -m bench.tier_compression " + " ".join(sys.argv[1:]),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "seal": {},
        "int8": {},
        "redis": [],
    }

    def tell() -> None:
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")

    caches = {dtype: compute(dtype, options.tokens) for dtype in _DTYPES}
    for dtype, (spec, pages) in caches.items():
        format, blocks = BlockFormat("bench", spec.layout, spec.block_bytes), blocks_of(pages)
        ways = {"off": 0, "zstd": spec.dtype.itemsize}
        results["seal"][dtype] = {
            name: measure_seal(format, blocks, codec, options.rounds) for name, codec in ways.items()
        }
        results["int8"][dtype] = measure_int8(spec, pages, options.rounds)
        print(dtype, results["seal"][dtype], results["int8"][dtype], flush=True)
    results["rounding"] = measure_rounding(options.tokens // 2, options.steps)
    print(results["rounding"], flush=True)
    tell()
    if not options.server:
        return
    for rate in options.rates.split(","):
        limit(rate)
        command = [options.server, "--port", str(_PORT), "--save", "", "--bind", "127.0.0.1"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            time.sleep(2.0)
            for dtype, (spec, pages) in caches.items():
                format, blocks = BlockFormat("bench", spec.layout, spec.block_bytes), blocks_of(pages)
                row: dict[str, Any] = {"rate": rate, "dtype": dtype, "bytes": pages.nbytes}
                for name, times in asyncio.run(
                    measure_redis(format, blocks, spec.dtype.itemsize, options.rounds)
                ).items():
                    row[name] = {"best": min(times), "median": statistics.median(times)}
                results["redis"].append(row)
                print(row, flush=True)
                tell()
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
