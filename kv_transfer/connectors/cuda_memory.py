"""Memory of a CUDA device that another process maps: CUDA's interprocess handles, by the driver's own library.

Source: CUDA Driver API, cuIpcGetMemHandle and cuIpcOpenMemHandle. Both processes run on one host; they may use one
device, or two that reach each other's memory.
"""

import ctypes
from functools import cache
from typing import Any

import msgspec
import torch

from kv_transfer.connectors.base import ConnectorError

HANDLE_BYTES = 64
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class MemoryHandle(msgspec.Struct, frozen=True):
    """Where a tensor's memory is, for other processes."""

    handle: bytes  # of the allocation that holds it
    size: int  # bytes of that allocation
    offset: int  # bytes from its begin


def export(tensor: torch.Tensor) -> MemoryHandle:
    """The handle of a contiguous tensor's memory. Raises ConnectorError."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        torch.cuda.synchronize()  # has a context
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(tensor.data_ptr()))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return MemoryHandle(bytes(handle), size.value, tensor.data_ptr() - base.value)


class MappedMemory:
    """`num_bytes` of another process's memory, mapped for kernels on `device`. Raises ConnectorError if it cannot be.

    Nothing outside the peer's allocation can be reached through it, whatever the peer says.
    """

    def __init__(self, memory: MemoryHandle, num_bytes: int, device: torch.device) -> None:
        if len(memory.handle) != HANDLE_BYTES or not 0 <= memory.offset < 1 << 63:
            raise ConnectorError("malformed handle of CUDA memory")
        self._device = device
        self._base = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            handle = _Handle.from_buffer_copy(memory.handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._base), handle, ctypes.c_uint(_PEER_ACCESS))
        try:
            if memory.offset + num_bytes > (size := self._size(memory)):
                raise ConnectorError(
                    f"{num_bytes} bytes from byte {memory.offset} on are more than the receiver's CUDA memory of {size}"
                )
        except BaseException:
            self.close()
            raise
        self.address = self._base.value + memory.offset

    def _size(self, memory: MemoryHandle) -> int:
        """Bytes that are mapped: as the driver has it; a driver that does not know it of mappings leaves the peer's."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            with torch.cuda.device(self._device):
                _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), self._base)
        except ConnectorError:
            return memory.size
        return start.value + size.value - self._base.value

    def write(self, source: torch.Tensor) -> None:
        """Starts a copy of a contiguous tensor on the device to the begin, on the device's present stream.

        The device's copy engine does it, without a kernel. Raises ConnectorError.
        """
        address, size = ctypes.c_uint64(source.data_ptr()), ctypes.c_size_t(source.nbytes)
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            _call("cuMemcpyAsync", ctypes.c_uint64(self.address), address, size, stream)

    def close(self) -> None:
        """Unmaps it. Nothing may be writing."""
        with torch.cuda.device(self._device):
            _call("cuIpcCloseMemHandle", self._base)


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConnectorError(f"there is no CUDA driver here: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    if status := getattr(_library(), name)(*arguments):
        text = ctypes.c_char_p()
        _library().cuGetErrorName(status, ctypes.byref(text))
        raise ConnectorError(f"{name}: {text.value.decode() if text.value else status}")
