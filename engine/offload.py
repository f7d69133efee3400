"""Where a model's weights lie: on their CUDA device or, while the engine sleeps, in pinned memory of the CPU."""

from collections.abc import Callable, Iterable

import torch
from torch import nn


class Offload:
    """The parameters and buffers of `model`; a model keeps nothing else on its device.

    The copy on the CPU is made once and stays: weights do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = [*model.parameters(), *model.buffers()]
        self._device = self._tensors[0].device
        self._copies: list[torch.Tensor] = []  # bytes of each storage, pinned

    def to_host(self) -> None:
        """Leaves the device."""
        if not self._copies:
            move_storages(self._tensors, self._copied)
            torch.cuda.synchronize(self._device)
        else:
            copies = iter(self._copies)
            move_storages(self._tensors, lambda _: next(copies))

    def to_device(self) -> None:
        """Comes back. Raises torch.OutOfMemoryError if there is no room any more; `to_host` makes that good."""
        move_storages(self._tensors, lambda data: data.to(self._device, non_blocking=True))

    def _copied(self, data: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        self._copies.append(copy.copy_(data, non_blocking=True))
        return copy


@torch.inference_mode(False)  # a tensor of that mode could not take the place of one that is none
def move_storages(tensors: Iterable[torch.Tensor], moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Has the tensors lie in other memory: `moved(bytes uint8 [n])` gives it, once for each storage.

    Tensors that share a storage, such as tied weights, share the new one.
    """
    storages: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = moved(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        new = torch.empty(0, dtype=tensor.dtype, device=storages[key].device)
        tensor.data = new.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
