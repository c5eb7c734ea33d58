"""Autocast as gapless meets it: off in every backward, replayed in every recompute."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.stage.split.call_signature import functions_named

# As torch has them: see `process_state` for what a layer gets.
increment_nesting: Callable[[], int] = torch.autocast_increment_nesting
decrement_nesting: Callable[[], int] = torch.autocast_decrement_nesting
clear_cache: Callable[[], None] = torch.clear_autocast_cache

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled  # whether any device casts by itself here
_DEVICE_TYPES = ("cpu", "cuda")
# What autocast runs in the lower precision, as people call it.
_CASTING = frozenset(
    functions_named(
        torch,
        Tensor,
        F,
        names="linear matmul __matmul__ __rmatmul__ mm bmm addmm addbmm baddbmm prelu scaled_dot_product_attention "
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
    )
)
_CASTING_ON_CUDA = frozenset(functions_named(torch, Tensor, names="mv addmv addr"))


class AutocastState:
    """The autocast of the place where it was made, to be entered again elsewhere."""

    def __init__(self) -> None:
        self._cache = torch.is_autocast_cache_enabled()
        self._states = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES
        ]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Autocast as it was."""
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._states:
                if enabled != torch.is_autocast_enabled(kind) or enabled:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache))
            yield


def runs_low(func: Any, kind: str) -> bool:
    """Whether autocast runs a call on this kind of device in the lower precision."""
    return func in _CASTING or (kind == "cuda" and func in _CASTING_ON_CUDA)


def casts_are_kept() -> bool:
    """Whether autocast keeps a parameter's cast beyond this place: inside of any autocast, a switched off one too."""
    increment_nesting()
    return decrement_nesting() > 0


def clear_casts() -> None:
    """Autocast keeps the casts it made. Those made without a graph must not be used where one is built."""
    if autocast_is_on():
        clear_cache()


@contextlib.contextmanager
def _switched_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


_AS_IT_IS = contextlib.nullcontext()


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast off: gradients are computed in the types of the forward, as torch advises."""
    return _switched_off() if autocast_is_on() else _AS_IT_IS
