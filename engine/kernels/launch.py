"""Launching kernels so that each may begin while the one before it ends.

A decode step is hundreds of kernels of a few microseconds, and between two of them a card is idle while the one drains
and the other fills. With programmatic dependent launch (CUDA programming guide; Hopper and newer) a kernel starts
early, reads what does not depend on others, such as weights, and waits with `gdc_wait` for all that came before. Every
kernel of ours waits before it reads or writes anything else, so the order of memory is that of the stream.
"""

import os
from functools import cache
from typing import Any

import torch


@cache
def launch_options() -> dict[str, Any]:
    """Options of every launch; `PDL` is a constant of each kernel."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.cuda is None:
        return {"PDL": False}
    early = torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
