"""What a worker remembers of its latest KV transfers, for `tandem kv trace`."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

import grpc.aio

from kv_transfer.process_identity import boot_id
from services.attempts import is_named
from services.rpc import trace_pb2, trace_pb2_grpc

_TRANSFERS = 512
_PUSHES = 4096  # of one transfer: 80 layers in 51 chunks


class Timeline:
    """One side of a transfer, as it goes on. Event loop and engine thread both write, each a line at a time."""

    def __init__(self, record: trace_pb2.Timeline) -> None:
        self.record = record

    def mark(self, event: str, detail: str = "", at: float | None = None) -> None:
        """Something happens, now or at `at` (monotonic seconds)."""
        self.record.marks.add(event=event, at=time.monotonic() if at is None else at, detail=detail)

    def push(self, layers: range, tokens: int, computed: float, num_bytes: int) -> None:
        """Layers, computed at `computed` (monotonic seconds) for prompt tokens up to `tokens`, are pushed now."""
        self.record.bytes += num_bytes
        if len(self.record.pushes) == _PUSHES:
            self.record.pushes_left_out += 1
            return
        seconds = time.monotonic() - computed
        self.record.pushes.add(
            layer=layers.start, layers=len(layers), tokens=tokens, at=computed, seconds=seconds, bytes=num_bytes
        )


class Timelines(trace_pb2_grpc.TraceServicer):
    """The latest transfers of this worker: a ring of 512."""

    def __init__(self, worker: str, incarnation: str) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._ring: OrderedDict[tuple[str, str], Timeline] = OrderedDict()  # by peer and transfer

    def open(self, transfer_id: str, peer: str, *, sends: bool) -> Timeline:
        """The timeline of a transfer with the worker of incarnation `peer`. `sends`: this is its prefill side."""
        record = trace_pb2.Timeline(
            transfer_id=transfer_id, worker=self._worker, incarnation=self._incarnation, peer=peer, sends=sends
        )
        self._ring[(peer, transfer_id)] = timeline = Timeline(record)
        if len(self._ring) > _TRANSFERS:
            self._ring.popitem(last=False)
        return timeline

    async def Timelines(
        self, request: trace_pb2.TimelinesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> trace_pb2.TimelinesReply:
        """Those of a request; the latest one if none is named."""
        records = [timeline.record for timeline in self._ring.values()]
        found = [record for record in records if is_named(request.request, record.transfer_id)]
        return trace_pb2.TimelinesReply(
            timelines=found if request.request else records[-1:], boot_id=boot_id(), now=time.monotonic()
        )
