"""Which CUDA devices a worker uses, of those that its machine shows it."""

import os

import torch


def take_devices(first: int, count: int) -> None:
    """Leaves this process, and those it starts, `count` devices from the `first` visible one on, counted round.

    If there are fewer it leaves all. To be called before anything is done with a device.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if names:
        taken = [names[(first + number) % len(names)] for number in range(min(count, len(names)))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
