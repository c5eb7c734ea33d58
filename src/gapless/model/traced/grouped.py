"""Products of groups of rows with a matrix each, as experts compute them: torch multiplies every type of number, but
traces bfloat16 alone. While a model is traced the others get an operator of ours, and their pieces run torch's.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def run_grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """What a piece runs: torch's own, which has a backward. `offs` are the ends of the groups."""
    if isinstance(rows, FakeTensor) and rows.dtype != torch.bfloat16:
        return rows @ matrices[0]  # takes as much, and nobody asks for numbers
    return torch._grouped_mm(rows, matrices, offs=offs)


grouped_mm = torch.library.custom_op("gapless::grouped_mm", run_grouped_mm, mutates_args=())


@grouped_mm.register_fake
def _(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    columns, aligned = matrices.shape[-1], 16 // rows.element_size() if torch.version.cuda else 1
    stride = (columns + aligned - 1) // aligned * aligned  # as torch lays it out
    return rows.new_empty_strided((rows.shape[0], columns), (stride, 1))


def traceable_mm(original: Any, rows: Tensor, matrices: Tensor, offs: Any = None, **more: Any) -> Any:
    """`torch._grouped_mm` for the thread that traces."""
    ours = rows.dim() == 2 and matrices.dim() == 3 and offs is not None and all(each is None for each in more.values())
    if ours and rows.dtype != torch.bfloat16:
        return grouped_mm(rows, matrices, offs)
    return original(rows, matrices, offs=offs, **more)
