"""The random calls of torch, and the handlers of those that draw only sometimes, or in a way of their own."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.stage.split.call_mode import Mode
from gapless.stage.split.call_signature import functions_named

_DROPOUT = {"input": None, "p": 0.5, "training": True, "inplace": False}


def dropout(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.dropout(x, p, training, inplace)`."""
    input, p, training, inplace = {**_DROPOUT, **dict(zip(_DROPOUT, args, strict=False)), **kwargs}.values()
    if (not training or p == 0.0) and 0.0 <= p <= 1.0:
        return input
    if mode.alone or mode.first_call is not None or inplace or not 0.0 < p < 1.0 or input.device.type != "cpu":
        return mode.draw(func, args, kwargs)
    mode.refuse_checkpoint()
    # The very operations of at::dropout on a CPU, with a generator of our own.
    noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=mode.draws.generator(input.device)).div_(1.0 - p)
    return input * noise


def attention(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.scaled_dot_product_attention`, which draws only with dropout."""
    p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return mode.draw(func, args, kwargs) if p else mode.plain(func, args, kwargs)


def recurrent(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_VF.lstm` and its like, which draw only with dropout: their one float."""
    draws = any(type(arg) is float and arg > 0.0 for arg in args)
    return mode.draw(func, args, kwargs) if draws else mode.plain(func, args, kwargs)


# Every function of torch that draws from a default generator, and is not above.
RANDOM: list[Callable[..., Any]] = [
    *functions_named(
        torch,
        names="rand rand_like randint randint_like randn randn_like randperm normal bernoulli multinomial poisson "
        "binomial "
        "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
        "feature_alpha_dropout_ native_dropout rrelu rrelu_ _standard_gamma _sample_dirichlet _fused_dropout",
    ),
    *functions_named(
        Tensor,
        names="bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_",
    ),
    *functions_named(torch._C._nn, names="rrelu_with_noise rrelu_with_noise_"),
    # Python functions that a mode is asked about as a whole: what they draw inside it is not asked about again.
    *functions_named(
        torch.nn.init,
        names="uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
        "kaiming_normal_ orthogonal_ sparse_",
    ),
    *functions_named(
        F,
        names="alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout rrelu gumbel_softmax "
        "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices",
    ),
]
RECURRENT: list[Callable[..., Any]] = functions_named(torch, names="lstm gru rnn_tanh rnn_relu")
