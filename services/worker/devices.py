"""Which CUDA devices a worker uses, of those that its machine shows it."""

import os

import torch

from services.config import ConfigError


def take_devices(first: int, count: int) -> None:
    """Leaves this process, and those it starts, `count` devices from the `first` visible one on, counted round.

    To be called before anything is done with a device. Raises ConfigError if CUDA then shows another number of them:
    there are fewer, or it had been asked before. Without CUDA, only the variable is set.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    if names:
        taken = [names[(first + number) % len(names)] for number in range(min(count, len(names)))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)
    found = torch.cuda.device_count()
    if found not in (0, count):
        raise ConfigError(
            f"tensor_parallel {count}: CUDA shows {found} devices with "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}, "
            "and each rank needs one: lower tensor_parallel, or start the worker with CUDA_VISIBLE_DEVICES naming more"
        )
