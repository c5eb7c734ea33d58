"""Products of groups of rows with a matrix each, as experts compute them: torch multiplies every type of number, but
traces bfloat16 alone. While a model is traced the others get an operator of ours, and their pieces run torch's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gapless::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """`offs` are the ends of the groups."""
    return torch._grouped_mm(rows, matrices, offs=offs)


@grouped_mm.register_fake
def _(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    columns, aligned = matrices.shape[-1], 16 // rows.element_size() if torch.version.cuda else 1
    stride = (columns + aligned - 1) // aligned * aligned  # as torch lays it out
    return rows.new_empty_strided((rows.shape[0], columns), (stride, 1))


def run_grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """What a piece runs in its place: torch's own, which has a backward."""
    return torch._grouped_mm(rows, matrices, offs=offs)


def traceable(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch._grouped_mm` for the thread that traces."""

    def call(rows: Tensor, matrices: Tensor, *, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        ours = rows.dim() == 2 and matrices.dim() == 3 and offs is not None and bias is None and out_dtype is None
        if ours and rows.dtype != torch.bfloat16:
            made: Tensor = grouped_mm(rows, matrices, offs)
            return made
        return original(rows, matrices, offs=offs, bias=bias, out_dtype=out_dtype)

    return call
