"""What packing KV on its way over TCP gains: `sudo unshare --net python -m bench.kv_codec --json F`.

The default model computes a prompt of prose in float32 and in bfloat16; its KV is moved into the pages of another
process by the `tcp` connector, over a loopback that `tc` holds to each of the rates, with the codec (used or not, as
the connector finds) and without, in turn. So the command needs a network namespace of its own. Seconds count from the
first push until the last byte is in its page; reported are the first transfer, when nothing is known of link and codec
yet, and the median of the later ones. Every page is compared. Before that the codec alone is measured, on one core, on
frames as the connector makes them.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine.engine import Engine, EngineConfig
from engine.kv_cache import KVCache, KVCacheSpec
from engine.request import Request, SamplingParams
from engine.text.tokenizer import Tokenizer
from engine.weights.resolve import resolve
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import PoolDescription
from kv_transfer.connectors.codec import CODECS, pack, unpack
from kv_transfer.connectors.tcp import TcpReceiver
from kv_transfer.connectors.tcp_sender import TcpSender
from kv_transfer.references import BlockRef

_PROSE = Path(__file__).parent / "samples" / "sonnets.txt"
_INCARNATION = "b" * 32
_FRAME_BYTES = 1 << 19
_POLL_SECONDS = 2e-4
_DTYPES = ("float32", "bfloat16")


class Pool(msgspec.Struct):
    """What the receiving process is to have, and whether it offers the codec."""

    layout: str
    num_blocks: int
    codec: bool


class Landed(msgspec.Struct):
    """When the last byte was there (monotonic seconds), the sums of all pages, and what the codec saved."""

    at: float
    sums: list[int]
    unpacked: int
    packed: int


def compute(dtype: str, num_tokens: int) -> tuple[KVCacheSpec, torch.Tensor]:
    """(spec, KV [blocks, L, page, heads, 2 * dim]) of so many tokens of prose, computed by the default model."""
    folder = resolve()
    tokens = Tokenizer.from_folder(folder).encode_plain(_PROSE.read_text())[:num_tokens]
    engine = Engine.build(folder, EngineConfig(dtype=dtype, num_blocks=num_tokens // 16 + 8, threads=1))
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    engine.add(Request(request_id="prose", prompt_token_ids=tokens, sampling=sampling), hold=True)
    while engine.has_work():
        engine.step()
    spec = engine.kv_cache.spec
    blocks = engine.held_blocks("prose")[: len(tokens) // spec.block_size]
    return spec, engine.kv_cache.tensor[blocks].clone()


def measure_codec(spec: KVCacheSpec, pages: torch.Tensor) -> dict[str, float]:
    """Ratio and GB/s (of unpacked bytes) on frames of one layer; the best of some rounds."""
    at_once = max(1, _FRAME_BYTES // spec.layer_bytes)
    frames = [
        pages[start : start + at_once, layer].contiguous().view(torch.uint8).flatten().numpy()
        for layer in range(spec.num_layers)
        for start in range(0, len(pages), at_once)
    ]
    codec, total = spec.dtype.itemsize, sum(frame.size for frame in frames)
    packing, unpacking, size = [], [], 0
    for _ in range(5):
        started = time.perf_counter()
        packed = [pack(frame, codec) for frame in frames]
        packing.append(time.perf_counter() - started)
        joined = [memoryview(b"".join(pieces)) for pieces in packed]
        size = sum(map(len, joined))
        started = time.perf_counter()
        found = [unpack(data, codec, frame.size) for data, frame in zip(joined, frames, strict=True)]
        unpacking.append(time.perf_counter() - started)
        assert all(np.array_equal(*pair) for pair in zip(found, frames, strict=True)), "bits were lost"
    return {
        "ratio": size / total,
        "pack_gb_per_s": total / min(packing) / 1e9,
        "unpack_gb_per_s": total / min(unpacking) / 1e9,
    }


def receive() -> None:
    """The receiving process: a pool on stdin; then a transfer's name a line, answered when all of it has landed."""
    torch.set_num_threads(1)
    wanted = msgspec.json.decode(sys.stdin.readline(), type=Pool)
    spec, count = KVCacheSpec.parse(wanted.layout), wanted.num_blocks
    cache = KVCache(spec, count)
    pool = PoolDescription(_INCARNATION, count, spec.block_bytes, spec.layer_bytes, spec.layout)
    receiver = TcpReceiver(cache.tensor, pool, lambda block: 0, "127.0.0.1", b"", CODECS if wanted.codec else ())
    saved = {"packed": 0, "unpacked": 0}

    def on_unpack(packed: int, unpacked: int) -> None:
        saved["packed"] += packed
        saved["unpacked"] += unpacked

    receiver.counters.on_unpack = on_unpack
    print(receiver.describe().hex(), flush=True)
    refs = [BlockRef(_INCARNATION, block, 0) for block in range(count)]
    for line in sys.stdin:
        key = line.strip()
        cache.tensor.zero_()
        saved |= {"packed": 0, "unpacked": 0}
        receiver.expect(key, refs)
        print("expected", flush=True)
        while receiver.bytes_landed(key) != count * spec.block_bytes:
            assert receiver.failure(key) is None, receiver.failure(key)
            time.sleep(_POLL_SECONDS)
        at = time.monotonic()
        receiver.finish(key)
        landed = Landed(at, page_sums(cache.tensor, range(count)), **saved)
        print(msgspec.json.encode(landed).decode(), flush=True)
    receiver.close()


class Way:
    """Transfers of `pages` to a receiving process, with the codec or without."""

    def __init__(self, spec: KVCacheSpec, pages: torch.Tensor, codec: bool) -> None:
        self._pages, self._sums = pages, page_sums(pages, range(len(pages)))
        self._count = 0
        command = [sys.executable, "-m", "bench.kv_codec", "--receive"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tell(msgspec.json.encode(Pool(spec.layout, len(pages), codec)).decode())
        self.sender = TcpSender(bytes.fromhex(self._hear()), spec.layout, b"")

    def move(self) -> tuple[float, Landed]:
        """(seconds, what the receiver says) of one transfer."""
        self._count += 1
        key = f"bench{self._count}/0"
        self._tell(key)
        assert self._hear() == "expected"
        blocks = list(range(len(self._pages)))
        refs = [BlockRef(_INCARNATION, block, 0) for block in blocks]
        started = time.monotonic()
        for layer in range(self._pages.shape[1]):
            self.sender.push(key, layer, self._pages, blocks, refs)
        self.sender.flush(key)
        landed = msgspec.json.decode(self._hear(), type=Landed)
        assert landed.sums == self._sums, "the pages are not those that were sent"
        return landed.at - started, landed

    def close(self) -> None:
        """Ends both sides."""
        self.sender.close()
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(10)

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def _hear(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline().strip()


def measure_link(spec: KVCacheSpec, pages: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Seconds without the codec and with it, in turn, over the link as it is."""
    ways = {"plain": Way(spec, pages, False), "codec": Way(spec, pages, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last = Landed(0.0, [], 0, 0)
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                taken, last = way.move()
                seconds[name].append(taken)
        found = ways["codec"].sender.condition()
    finally:
        for way in ways.values():
            way.close()
    plain, codec = (statistics.median(seconds[name][1:]) for name in ("plain", "codec"))
    return {
        "bytes": pages.nbytes,
        "plain_seconds": plain,
        "codec_seconds": codec,
        "plain_first_seconds": seconds["plain"][0],
        "codec_first_seconds": seconds["codec"][0],
        "packed_share": last.unpacked / pages.nbytes,
        "wire_share": 1 - (last.unpacked - last.packed) / pages.nbytes,
        "found": found,
    }


def limit(rate: str) -> None:
    """Holds loopback to a rate as tc names it; `none` to nothing. Raises CalledProcessError."""
    run = ("ip", "link", "set", "lo", "up", "mtu", "1500")
    subprocess.run(run, check=True)
    subprocess.run(("tc", "qdisc", "del", "dev", "lo", "root"), stderr=subprocess.DEVNULL)
    if rate != "none":
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        subprocess.run(("tc", "qdisc", "add", "dev", "lo", "root", *shape), check=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit,none", help="as tc names them; none: no limit")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive()
        return
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        parser.error("this would slow down the machine's own loopback: run it under `unshare --net`")
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "command": "python -m bench.kv_codec " + " ".join(sys.argv[1:]),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "codec": {},
        "links": [],
    }
    caches = {dtype: compute(dtype, options.tokens) for dtype in _DTYPES}
    for dtype, (spec, pages) in caches.items():
        results["codec"][dtype] = found = measure_codec(spec, pages)
        print(dtype, {name: round(value, 3) for name, value in found.items()}, flush=True)
    for rate in options.rates.split(","):
        limit(rate)
        for dtype, (spec, pages) in caches.items():
            row = {"rate": rate, "dtype": dtype} | measure_link(spec, pages, options.rounds)
            results["links"].append(row)
            print(
                f"{rate}, {dtype}: plain {row['plain_seconds']:.3f} s, codec {row['codec_seconds']:.3f} s", flush=True
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
