"""Measures connectors between this process, which receives, and a child, which sends.

Each connector is measured in rounds that alternate with rounds of the raw link under it (`links`), so that whatever
else the machine does slows both.
"""

import os
import platform
import random
import secrets
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
import zmq

from kv_transfer.bench.child import STUCK_SECONDS, Child
from kv_transfer.bench.connectors import WAYS, Destination, devices, peer_access, why_not
from kv_transfer.bench.links import Link
from kv_transfer.bench.messages import SPEC, Answer, Close, Open, Push, pattern
from kv_transfer.checksums import page_sums
from kv_transfer.connectors.base import ConnectorError, PoolDescription
from kv_transfer.references import BlockRef

_ROUNDS = 11
_SMALL_ROUNDS = 101
_INCARNATION = "b" * 32
_POLL_SECONDS = 2e-5


class Result(msgspec.Struct):
    """One connector. Seconds from the first push to the last byte in its page; medians of all rounds."""

    connector: str
    layout: str  # contiguous or scattered
    bytes: int
    gb_per_s: float
    verified_gb_per_s: float  # until the sums of all pages, taken on both sides after the last byte, were compared
    latency_us: float  # of one layer of one block
    limit: str  # what the raw link is
    limit_gb_per_s: float
    limit_latency_us: float
    fraction_of_limit: float  # of the throughput
    verified_fraction_of_limit: float
    rounds: int


class Report(msgspec.Struct):
    """All results of one run, and where it ran."""

    command: str
    started_at: str
    cpus: int
    load_average: float  # of the minute before
    kernel: str
    python: str
    torch: str
    sender_device: str  # the CUDA device's name, as the next one's; empty: there is none
    receiver_device: str
    peer_access: bool | None  # whether the two can access each other's memory; None: they are one
    block_bytes: int
    layer_bytes: int
    results: list[Result]
    skipped: list[str]  # what this machine cannot measure, and why
    failed: list[str]  # what did not work, and why


class Seconds(NamedTuple):
    """Of one transfer, from the first push on."""

    moved: float  # until the last byte was in its page
    verified: float  # until the sums of all pages were compared; as `moved` where none are taken


class Transfers:
    """Transfers of `num_blocks` blocks one way, into a pool of twice as many."""

    def __init__(self, child: Child, way: str, num_blocks: int, layout: str, sender: str, receiver: str) -> None:
        self._child = child
        self._way = way
        self._device = receiver
        self._generation = [0] * (2 * num_blocks)
        self._turn = 0
        key = secrets.token_bytes(32)
        curve = list(zmq.curve_keypair()) if WAYS[way].curve else []
        pool = PoolDescription(_INCARNATION, 2 * num_blocks, SPEC.block_bytes, SPEC.layer_bytes, SPEC.layout)
        self._cache, self._receiver = WAYS[way].receive(
            Destination(pool, self._generation.__getitem__, receiver, key, curve)
        )
        draw = random.Random(0)
        blocks = range(2 * num_blocks)
        self._source = list(blocks[:num_blocks]) if layout == "contiguous" else draw.sample(blocks, num_blocks)
        self._destination = list(blocks[-num_blocks:]) if layout == "contiguous" else draw.sample(blocks, num_blocks)
        self._shape = list(self._cache.tensor.shape)
        child.ask(Open(way, self._receiver.describe(), self._shape, sender, key, curve))

    def check(self) -> None:
        """One transfer into an empty pool, which then holds what was sent and nothing else. Raises ConnectorError."""
        self._cache.tensor.zero_()
        if self._cache.tensor.is_cuda:
            torch.cuda.synchronize(self._device)
        self.seconds(small=False)
        words = self._cache.tensor.view(torch.int64).flatten(1)
        sent = pattern(self._shape, self._device).view(torch.int64).flatten(1)
        rest = sorted(set(range(len(self._generation))) - set(self._destination))
        if not torch.equal(words[self._destination], sent[self._source]) or bool(words[rest].any()):
            raise ConnectorError("the bytes that arrived are not those that were sent")

    def seconds(self, *, small: bool) -> Seconds:
        """Of one transfer: all layers of all blocks, or the first layer of one block, of which no sums are taken."""
        count, layers = (1, 1) if small else (len(self._source), SPEC.num_layers)
        self._turn += 1
        key = f"bench{self._turn}/0"
        refs = []
        for block in self._destination[:count]:
            self._generation[block] += 1
            refs.append(BlockRef(_INCARNATION, block, self._generation[block]))
        receiver = self._receiver
        receiver.expect(key, refs)
        self._child.tell(Push(key, layers, self._source[:count], refs, sums=not small))
        if receiver.capabilities.one_sided:
            answer = self._child.hear()
            ended = answer.ended
        else:
            pushed = self._wait(key, count * layers * SPEC.layer_bytes)
            ended = time.monotonic()
            answer = pushed or self._child.hear()
        receiver.finish(key)
        if small:
            return Seconds(ended - answer.started, ended - answer.started)
        if page_sums(self._cache.tensor, self._destination) != answer.sums:
            raise ConnectorError("the sums of the pages that arrived are not those of the pages that were sent")
        return Seconds(ended - answer.started, time.monotonic() - answer.started)

    def close(self) -> None:
        """Frees pool and connector."""
        self._receiver.close()

    def _wait(self, key: str, num_bytes: int) -> Answer | None:
        """Until the bytes have landed; returns the child's answer if it has come before. Raises ConnectorError."""
        patience_ends = time.monotonic() + STUCK_SECONDS
        answer = None
        while self._receiver.bytes_landed(key) != num_bytes:
            if failure := self._receiver.failure(key):
                raise ConnectorError(failure)
            if answer is None and self._child.has_answered():
                answer = self._child.hear()
            if time.monotonic() > patience_ends:
                raise ConnectorError(f"the bytes have not arrived in {STUCK_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        return answer


def run(connector: str | None, num_bytes: int, layouts: list[str], command: str, tell: Callable[[str], None]) -> Report:
    """Measures one connector, or all that this machine can; `tell` is given a line for people about each.

    Raises ConnectorError if the one that is named cannot be measured here.
    """
    chosen = [name for name, way in WAYS.items() if connector in (None, way.connector)]
    reasons = {name: reason for name in chosen if (reason := why_not(WAYS[name]))}
    if len(reasons) == len(chosen):
        raise ConnectorError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    sender, receiver = map(torch.cuda.get_device_name, devices() or ()) if devices() else ("", "")
    report = Report(
        command=command,
        started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpus=len(os.sched_getaffinity(0)),
        load_average=round(os.getloadavg()[0], 2),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        sender_device=sender,
        receiver_device=receiver,
        peer_access=peer_access(),
        block_bytes=SPEC.block_bytes,
        layer_bytes=SPEC.layer_bytes,
        results=[],
        skipped=[f"{name}: {reason}" for name, reason in reasons.items()],
        failed=[],
    )
    for line in report.skipped:
        tell(f"skipped {line}")
    num_blocks = max(1, num_bytes // SPEC.block_bytes)
    child = Child()
    try:
        for layout in layouts:
            for way in chosen:
                if way in reasons:
                    continue
                try:
                    result = _measure(child, way, num_blocks, layout)
                except (ConnectorError, OSError, RuntimeError) as error:  # the last is what torch and devices raise
                    child.close()  # what it has still to do or to say is nobody's
                    child = Child()
                    report.failed.append(f"{way}, {layout}: {error}")
                    tell(f"failed {report.failed[-1]}")
                else:
                    report.results.append(result)
                    tell(f"{way}, {layout}: {result.gb_per_s:.2f} GB/s")
    finally:
        child.close()
    return report


def _measure(child: Child, way: str, num_blocks: int, layout: str) -> Result:
    num_bytes = num_blocks * SPEC.block_bytes
    sender, receiver = (devices() if WAYS[way].num_devices else None) or ("cpu", "cpu")
    opened: list[Link | Transfers] = []
    try:
        link = WAYS[way].link(child, num_bytes, sender, receiver)
        opened.append(link)
        transfers = Transfers(child, way, num_blocks, layout, sender, receiver)
        opened.append(transfers)
        transfers.check()
        large, limit_large = _alternate(transfers, link, num_bytes, _ROUNDS, small=False)
        small, limit_small = _alternate(transfers, link, SPEC.layer_bytes, _SMALL_ROUNDS, small=True)
        transfers.check()
        child.ask(Close())  # before the memory that it has mapped goes
    finally:
        for part in opened:
            part.close()
    return Result(
        connector=way,
        layout=layout,
        bytes=num_bytes,
        gb_per_s=num_bytes / large.moved / 1e9,
        verified_gb_per_s=num_bytes / large.verified / 1e9,
        latency_us=small.moved * 1e6,
        limit=link.name,
        limit_gb_per_s=num_bytes / limit_large / 1e9,
        limit_latency_us=limit_small * 1e6,
        fraction_of_limit=limit_large / large.moved,
        verified_fraction_of_limit=limit_large / large.verified,
        rounds=_ROUNDS,
    )


def _alternate(transfers: Transfers, link: Link, num_bytes: int, rounds: int, *, small: bool) -> tuple[Seconds, float]:
    """Median seconds of both."""
    link.seconds(num_bytes)  # takes pages, opens windows
    pairs = [(transfers.seconds(small=small), link.seconds(num_bytes)) for _ in range(rounds)]
    own = Seconds(*(statistics.median(values) for values in zip(*(own for own, _ in pairs), strict=True)))
    return own, statistics.median(raw for _, raw in pairs)
