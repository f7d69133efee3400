"""A connector's sending end with faults in its pushes: what a writer without a socket can suffer or do."""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from chaos.faults import Faults

from kv_transfer.connectors.base import ConnectorError, SenderConnector
from kv_transfer.references import BlockRef

Push = Callable[[], int]


class FaultySender(SenderConnector):
    """Pushes through `inner`.

    `later(seconds, call)` runs a call on the engine thread. `present` gives a block's present generation and means:
    write as if there were no references. That is the negative control, no writer of ours can do it.
    """

    def __init__(
        self,
        inner: SenderConnector,
        faults: Faults,
        later: Callable[[float, Callable[[], None]], None],
        present: Callable[[int], int] | None,
    ) -> None:
        self.counters = inner.counters
        self._inner = inner
        self._faults = faults
        self._later = later
        self._present = present
        self._held: dict[str, Push] = {}  # pushes that change places with the next of their transfer
        self._closed = False
        self._lock = threading.Lock()

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        kind = self._faults.draw("push")

        def push() -> int:
            if kind != "corrupt":
                return self._inner.push(transfer_id, layer, source, source_blocks, blocks)
            self._count(kind, transfer_id)
            return self._inner.push(
                transfer_id, layer, self._damaged(source, source_blocks), range(len(blocks)), blocks
            )

        match kind:
            case "delay":
                time.sleep(0.02)
            case "cut":
                self._count(kind, transfer_id)
                raise ConnectorError("chaos: the connector fails")
            case "drop":
                self._count(kind, transfer_id)
                return 0
            case "truncate":
                self._count(kind, transfer_id)
                half = len(blocks) // 2
                if not half:
                    return 0
                return self._inner.push(transfer_id, layer, source, source_blocks[:half], blocks[:half])
            case "reorder" if transfer_id not in self._held:
                self._held[transfer_id] = push
                return 0
        num_bytes = push()
        if (held := self._held.pop(transfer_id, None)) is not None:
            self._count("reorder", transfer_id)
            num_bytes += held()
        match kind:
            case "delay":
                self._count(kind, transfer_id)
            case "duplicate":
                self._count(kind, transfer_id)
                num_bytes += push()
            case "replay":
                copy = source[list(source_blocks)].clone()
                seconds = self._faults.random.choice((0.05, 0.2, 0.6))
                self._later(seconds, lambda: self._replay(transfer_id, layer, copy, blocks))
        return num_bytes

    def flush(self, transfer_id: str) -> None:
        if (held := self._held.pop(transfer_id, None)) is not None:
            held()
        self._inner.flush(transfer_id)

    def stop(self, transfer_id: str) -> None:
        self._held.pop(transfer_id, None)
        if self._faults.draw("stop"):
            time.sleep(self._faults.random.choice((0.02, 0.3)))
            self._count("delay", transfer_id, "stop")
        self._inner.stop(transfer_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._inner.close()

    def _replay(self, transfer_id: str, layer: int, source: torch.Tensor, blocks: Sequence[BlockRef]) -> None:
        if self._present is not None:
            blocks = [msgspec.structs.replace(ref, generation=self._present(ref.block_id)) for ref in blocks]
        with self._lock:
            if self._closed:
                return
            self._count("replay", transfer_id)
            try:
                self._inner.push(transfer_id, layer, source, range(len(blocks)), blocks)
                self._inner.stop(transfer_id)
            except ConnectorError:
                pass  # refused, as it should be once the transfer is over

    def _damaged(self, source: torch.Tensor, source_blocks: Sequence[int]) -> torch.Tensor:
        """These blocks of `source`, with one bit flipped in each layer: no checksum but that of the source tells."""
        copy, dice = source[list(source_blocks)].clone(), self._faults.random
        layers = copy.flatten(2).view(torch.uint8)[dice.randrange(len(source_blocks))]
        layers[:, dice.randrange(layers.shape[1])] ^= 1 << dice.randrange(8)
        return copy

    def _count(self, kind: str, transfer_id: str, place: str = "push") -> None:
        self._faults.count(place, kind, transfer_id)
