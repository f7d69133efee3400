"""Rounding of rows to eight bits, each row with a scale of its own, so that its largest value is the type's largest."""

import torch

_LEAST_SCALE = 1e-12  # of a row of zeros


def round_rows(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(rounded `dtype` [N, K], scale float32 [N, 1]) of rows [N, K]: rounded * scale is near them.

    float8_e4m3fn has a relative error of 1/16 at most, int8 an absolute one of half a scale. A row with a value that is
    not finite has a scale that is not, either.
    """
    rows = rows.float()
    largest = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    scale = rows.abs().amax(dim=1, keepdim=True).div_(largest).clamp_(min=_LEAST_SCALE)
    rounded = rows / scale
    if not dtype.is_floating_point:
        rounded = rounded.round_()
    # Beyond the largest value by a rounding of the division, some versions of torch make NaN of it.
    return rounded.clamp_(-largest, largest).to(dtype), scale
