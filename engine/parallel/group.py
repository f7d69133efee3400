"""What a rank knows of the others, and the collectives between them.

Each rank has a part of the query heads, of the KV heads, of the MLP's columns and of the vocabulary. Their partial
products are added up behind attention and MLP; hidden states are whole on every rank, and so is the embedding table:
each step reads only a few rows of it, which is less work than one more sum.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch
import torch.distributed as dist

from engine.config import ModelConfig, ModelError
from engine.layers.linear import Linear
from engine.weights.place import Place

if TYPE_CHECKING:
    from engine.parallel.messages import Message

M = TypeVar("M")
A = TypeVar("A")
G = TypeVar("G")

_TIMEOUT = timedelta(minutes=5)  # a rank that lags so far behind in a collective hangs
# The name since torch 2.13; the older one is deprecated there.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RankError(RuntimeError):
    """The ranks cannot go on together: their processes have to end."""


class Group:
    """The only rank there is: it has everything, and nobody to exchange it with."""

    rank = 0
    size = 1

    def join(self) -> None:
        """Waits until all ranks have loaded their weights."""

    def close(self) -> None:
        """Ends what was begun for the group."""

    def lead(self, model: M, attention: A, graphs: G) -> tuple[M, A, G]:
        """What a runner is to use in their place, so that other ranks compute what it computes."""
        return model, attention, graphs

    def together(self, message: "Message") -> AbstractContextManager[None]:
        """Has the other ranks make the call that the caller makes inside."""
        return nullcontext()

    def meet(self) -> None:
        """Waits until all ranks are here."""

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return value

    def add_product(self, stream: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        """Adds to the stream [N, n], in place, the sum over the ranks of their products with their x [N, k]."""
        linear.add_to(stream, x)

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        """[N, n] of each rank to [N, n * size] in the order of ranks, on every rank."""
        return part

    def place(self, parameter: torch.Tensor, dim: int | None) -> Place:
        """Where this rank's part of a checkpoint's tensor goes.

        `dim` is the one that the ranks split; None: each has all. Along the inputs, 1, products are added up: then a
        bias, which has none, counts on rank 0 alone, and the scales of a quantised weight's rows, [n, 1], on each.
        """
        return Place(parameter)


ALONE = Group()


class TensorParallelGroup(Group):
    """One of `size` ranks: over gloo on CPU, over NCCL on CUDA devices, where rank r computes on device r.

    `meeting`: a file of nobody else, by which the ranks find each other on this machine.
    """

    def __init__(self, rank: int, size: int, device: str, meeting: Path) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.set_device(rank)

    def join(self) -> None:
        """See `Group.join`."""
        # Nothing but loopback, unless somebody chose an interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            init_method=self._meeting.as_uri(),
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
            device_id=torch.device("cuda", self.rank) if self._cuda else None,
        )

    def close(self) -> None:
        """Ends the connections.

        On CUDA nothing waits for the other ranks. Without that NCCL's threads would look for them when the process
        ends, by a file that is gone then, until `_TIMEOUT`.
        """
        if not dist.is_initialized():
            return
        if self._cuda:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def add_product(self, stream: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        """See `Group.add_product`."""
        product = linear(x)
        if self._cuda:
            dist.all_reduce(product)
            stream += product
            return
        # Added in the order of ranks: with gloo's sum, the order depends on where an element stands in the batch.
        total, *others = self._gathered(product)
        for other in others:
            total += other
        stream += total

    def concatenate(self, part: torch.Tensor) -> torch.Tensor:
        """See `Group.concatenate`."""
        return self._gathered(part).transpose(0, 1).reshape(len(part), -1)

    def meet(self) -> None:
        """See `Group.meet`."""
        dist.barrier()

    def least(self, value: int) -> int:
        """See `Group.least`."""
        values = torch.tensor([value], device="cuda" if self._cuda else "cpu")
        dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values.item())

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, written into `tensor` on the others."""
        dist.broadcast(tensor, 0)
        return tensor

    def place(self, parameter: torch.Tensor, dim: int | None) -> Place:
        """See `Group.place`."""
        if dim is None or (dim == parameter.dim() and self.rank == 0) or (dim == 1 and parameter.shape[1:] == (1,)):
            return Place(parameter)
        if dim == parameter.dim():
            return Place(parameter.zero_()[:0], total=len(parameter))
        return Place(parameter, dim, self.rank * parameter.shape[dim], self.size * parameter.shape[dim])

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """[N, n] of each rank to [size, N, n]."""
        parts = part.new_empty((self.size * len(part), *part.shape[1:]))
        _gather(parts, part.contiguous())
        return parts.view(self.size, *part.shape)


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """What one of `size` ranks has of a model: its heads and MLP columns. Raises ModelError where they do not split."""
    split = {
        "KV heads": config.num_kv_heads,
        "attention heads": config.num_heads,
        "entries of the MLP": config.intermediate_size,
        "entries of the vocabulary": config.vocab_size,
    }
    for what, count in split.items():
        if count % size:
            raise ModelError(f"{count} {what} cannot be split evenly over {size} ranks: choose another tensor_parallel")
    return msgspec.structs.replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )
