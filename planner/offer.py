"""A kind of worker that can be had."""

import msgspec

from planner.simulator.timing import Timing


class Offer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its GPUs, how fast they are together, and what they hold."""

    gpu: str = ""  # name of the card
    gpus: int = 1  # tensor-parallel degree
    price: float = 1.0  # of each GPU, in an hour; 1: costs are counted in GPUs
    timing: Timing = Timing()
    kv_tokens: int = 800_000
    max_running: int = 256
    max_batched_tokens: int = 1280

    @property
    def cost(self) -> float:
        """Of a worker, in an hour."""
        return self.gpus * self.price

    def __str__(self) -> str:
        return f"{self.gpus} x {self.gpu}" if self.gpu else f"TP{self.gpus}"
