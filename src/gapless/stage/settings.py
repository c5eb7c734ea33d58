"""The settings of torch under which a layer is called: those that a model may read, and that kernels depend on."""

from typing import Any

import torch

from .autocast import autocast_is_on

_KINDS = ("cpu", "cuda")


def settings() -> tuple[Any, ...]:
    """Those of this thread, now. What was compiled or traced under others may compute something else."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _casts() if autocast_is_on() else None,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch._C._get_cudnn_enabled(),
        torch.get_default_dtype(),
        # A default device is a mode. Without any there is no need to look for it, which takes as long as a small layer.
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
    )


def _casts() -> tuple[torch.dtype | None, ...]:
    """What autocast casts to."""
    return tuple([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _KINDS])
