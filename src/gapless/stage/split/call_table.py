"""The torch calls that a stage answers itself, each with what answers it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.stage.guards import data_writes as behind
from gapless.stage.guards import grad_fields
from gapless.stage.norm import batchnorm_calls
from gapless.stage.random.random_calls import RANDOM, RECURRENT, attention, dropout, recurrent

from .call_mode import Handler, Mode
from .call_signature import opened
from .convolution import CONVOLUTIONS, convolution, embedding
from .linear import addmm, linear, matmul


def _opened(function: Any) -> Handler:
    """A handler for one of torch's own Python functions that hides the calls of the table: it runs with the mode on."""
    copy = opened(function)

    def handler(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return copy(*args, **kwargs)

    return handler


TABLE: dict[Any, Handler] = {
    F.linear: linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), matmul),
    torch.addmm: addmm,
    F.embedding: embedding,
    **dict.fromkeys(CONVOLUTIONS, convolution),
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(RANDOM, Mode.draw),
    **dict.fromkeys(RECURRENT, recurrent),
    **batchnorm_calls.HANDLERS,
    **behind.HANDLERS,
    **grad_fields.HANDLERS,
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
}
if hasattr(F, "linear_cross_entropy"):
    TABLE[F.linear_cross_entropy] = _opened(F.linear_cross_entropy)
