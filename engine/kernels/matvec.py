"""Product of a matrix and one vector: reads the weights at the speed of memory, which libraries do not for one row."""

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS = 2, 2048  # of a program's piece of the matrix; the best on an H100 for the shapes of 8B models


@triton.jit
def _matvec(x, weight, bias, y, N, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        valid = columns < K
        piece = tl.load(
            weight + rows[:, None].to(tl.int64) * K + columns[None, :], mask=inside[:, None] & valid[None, :], other=0.0
        )
        total += piece.to(tl.float32) * tl.load(x + columns, mask=valid, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + rows, result.to(y.dtype.element_ty), mask=inside)


def matvec(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [1, K], weight [N, K], bias [N], contiguous, of one dtype: x @ weight.T + bias, [1, N], summed in float32."""
    n, k = weight.shape
    y = torch.empty((1, n), dtype=x.dtype, device=x.device)
    columns = min(_COLUMNS, triton.next_power_of_2(k))
    _matvec[(triton.cdiv(n, _ROWS),)](
        x,
        weight,
        weight if bias is None else bias,
        y,
        n,
        k,
        _ROWS,
        columns,
        bias is not None,
        num_warps=4,
        num_stages=2,
    )
    return y
