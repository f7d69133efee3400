"""From a CUDA device into shared memory: the receiver's pool, which lies in a segment, is pinned for the device.

The device's copy engine writes it, block by block, beside the engine's steps. A segment is pinned once for all that
copy out of it and into it in this process (`lent_memory` reads such segments), in parts with rests, as it takes 0.2 s
for a GiB and others' calls of the driver wait meanwhile: in one go, 20 GiB held up a worker's steps and heartbeats for
3 s. What is not pinned yet, or cannot be, is
copied all the same, through memory of the driver's own: slower, and whoever asks may wait for it.
"""

import math
import threading
import time
import weakref
from collections.abc import Sequence

import msgspec
import structlog
import torch

from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.device_copies import CopyingSender
from kv_transfer.connectors.shared_memory import MappedSegment, SegmentDescription

log = structlog.get_logger()

_PART_BYTES = 64 << 20
_REST = 3.0  # times as long as a part took
_PAGE = 4096
_PORTABLE = 1  # cudaHostRegisterPortable: whatever device copies


class PinnedPool:
    """The pool in a segment: `pages` [num_blocks, block_bytes], uint8. Raises ConnectorError if it cannot be mapped."""

    def __init__(self, offer: SegmentDescription) -> None:
        self._segment = MappedSegment(offer)
        self.pages = torch.from_numpy(self._segment.rows).flatten(1)
        registration = _Registration(self.pages, offer.name)
        # Nobody copies any more when the last user has let go, and the mapping ends after this.
        weakref.finalize(self, registration.end, self._segment).atexit = False

    def check(self) -> None:
        """Raises ConnectorError if it cannot be used any more."""
        self._segment.check()


class _Registration:
    """Makes the driver know the pages, on a thread of its own."""

    def __init__(self, pages: torch.Tensor, name: str) -> None:
        self._pages = pages
        self._name = name
        self._done: list[int] = []  # addresses
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="kv-pin", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        start, size = self._pages.data_ptr(), self._pages.nbytes
        unit = math.lcm(self._pages.shape[1], _PAGE)  # a block is not cut, as a copy may not cross two parts
        part = max(1, _PART_BYTES // unit) * unit
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for first in range(0, size, part):
            if self._ending:
                return
            started = time.monotonic()
            error = int(cudart.cudaHostRegister(start + first, min(part, size - first), _PORTABLE))
            if error:
                log.warning(
                    "shared memory is not pinned, copies between it and the device are slower",
                    segment=self._name,
                    error=f"cudaHostRegister: {error}",
                    pinned_mib=first >> 20,
                    mib=size >> 20,
                )
                return
            self._done.append(start + first)
            time.sleep(_REST * (time.monotonic() - started))
        log.info("shared memory is pinned", segment=self._name, mib=size >> 20)

    def end(self, segment: MappedSegment) -> None:
        """Undoes it and closes the segment."""
        self._ending = True
        self._thread.join()
        for address in self._done:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        segment.close()


_pools: "weakref.WeakValueDictionary[str, PinnedPool]" = weakref.WeakValueDictionary()  # by name of the segment
_lock = threading.Lock()


def pinned(offer: SegmentDescription) -> PinnedPool:
    """The pool, until the last one has let go of it. Raises ConnectorError."""
    if not offer.stays:
        raise ConnectorError("the peer may give its memory back while it sleeps: a device cannot copy there")
    with _lock:
        pool = _pools.get(offer.name)
        if pool is None:
            pool = _pools[offer.name] = PinnedPool(offer)
        return pool


class PinnedSender(CopyingSender):
    """Writes into the pool of a segment, from caches on `device`. Raises ConnectorError."""

    _pinned: PinnedPool | None = None

    def _reach(self, description: bytes) -> None:
        self._pinned = pinned(msgspec.msgpack.decode(description, type=SegmentDescription))

    def _leave_memory(self) -> None:
        self._pinned = None

    def _copy(self, layers: range, source: torch.Tensor, source_blocks: Sequence[int], blocks: list[int]) -> None:
        """A copy for each block, of which the device makes one after another."""
        assert self._pinned is not None
        size = self.pool.layer_bytes
        rows = source[:, layers.start : layers.stop].flatten(1).view(torch.uint8)
        places = self._pinned.pages[:, layers.start * size : layers.stop * size]
        for ours, theirs in zip(source_blocks, blocks, strict=True):
            places[theirs].copy_(rows[ours], non_blocking=True)
