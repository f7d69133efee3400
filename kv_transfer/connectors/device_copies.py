"""What senders whose CUDA device writes into the receiver's pool have in common: copies on a stream of their own.

Who may write what is decided as in shared memory. Copies run behind the layer that they copy, so the sender's lock on a
transfer is held from its first push until `flush` or `stop` has seen the last copy end.
"""

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from kv_transfer.connectors.base import ConnectorError
from kv_transfer.connectors.shared_memory import SharedMemorySender
from kv_transfer.references import BlockRef


class CopyingSender(SharedMemorySender):
    """From caches on `device`. Raises ConnectorError if it cannot reach the pool that `description` names."""

    def __init__(self, description: bytes, layout: str, device: torch.device) -> None:
        super().__init__(description, layout)
        self._device = device
        self._lock = threading.Lock()  # over what follows and the sender's own lock on a transfer; held for moments
        self._ends: dict[str, torch.cuda.Event] = {}  # of the last copy of each transfer under way
        self._stream: Any = None
        try:
            if device.type != "cuda":
                raise ConnectorError("the KV cache here does not lie on a CUDA device")
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._reach(description)
        except BaseException as error:
            with contextlib.suppress(ConnectorError, RuntimeError):
                self.close()
            if isinstance(error, ConnectorError) or not isinstance(error, Exception):
                raise
            raise ConnectorError(f"the device cannot copy to the receiver: {error}") from error

    @abstractmethod
    def _reach(self, description: bytes) -> None:
        """Makes the pool's memory one that the device can write."""

    @abstractmethod
    def _copy(self, layers: range, source: torch.Tensor, source_blocks: Sequence[int], blocks: list[int]) -> None:
        """Starts the copy on the present stream."""

    @abstractmethod
    def _leave_memory(self) -> None:
        """Undoes `_reach`, whatever came of it. No copy is under way."""

    def push(
        self,
        transfer_id: str,
        layer: int,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """Starts the copy of the rows, behind what the device was given so far."""
        return self.push_layers(transfer_id, range(layer, layer + 1), source, source_blocks, blocks)

    def push_layers(
        self,
        transfer_id: str,
        layers: range,
        source: torch.Tensor,
        source_blocks: Sequence[int],
        blocks: Sequence[BlockRef],
    ) -> int:
        """The same for several: the layers of a block lie one after another."""
        if source.device != self._device:
            raise ConnectorError(f"the KV cache lies on {source.device}, the connector is for {self._device}")
        computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        computed.record(torch.cuda.current_stream(self._device))
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                destination = self.admit(transfer_id, layers, source, source_blocks, blocks)
            except ConnectorError:
                if transfer_id not in self._ends:
                    self.leave(transfer_id)
                raise
            self._stream.wait_event(computed)
            self._copy(layers, source, source_blocks, destination)
            source.record_stream(self._stream)  # pages that were packed for this push live until then
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(self._stream)
            self._ends[transfer_id] = end
        return self.count(len(layers) * len(blocks))

    def flush(self, transfer_id: str) -> None:
        """Waits for the last copy. Raises ConnectorError if the device failed."""
        try:
            self._end(transfer_id)
        except RuntimeError as error:
            raise ConnectorError(f"the device failed: {error}") from error

    def stop(self, transfer_id: str) -> None:
        """Copies take microseconds: they are seen out."""
        try:
            self._end(transfer_id)
        except RuntimeError:
            return  # a device that failed writes nothing any more, and its process ends

    def close(self) -> None:
        """Drops the mappings, all of them even if one fails. Raises ConnectorError or RuntimeError then."""
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                stream.synchronize()
        finally:
            try:
                self._leave_memory()
            finally:
                super().close()

    def _end(self, transfer_id: str) -> None:
        """Leaves once the last copy has ended, whoever else waits for the same."""
        while True:
            end = self._ends.get(transfer_id)
            if end is not None:
                end.synchronize()
            with self._lock:
                if self._ends.get(transfer_id) is end:  # else it was pushed again, or somebody has left already
                    self._ends.pop(transfer_id, None)
                    self.leave(transfer_id)
                    return
