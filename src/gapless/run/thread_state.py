"""What torch keeps per thread and the caller has set: it must hold in the threads that work for the caller too."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gapless.guards.process_wide import CALLERS_MODES
from gapless.stage.autocast import (
    AutocastState,
    autocast_is_on,
    casts_are_kept,
    clear_cache,
    decrement_nesting,
    increment_nesting,
)
from gapless.stage.random.exclusive import Heirs

_CPU = torch.device("cpu")
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_AS_A_THREAD_STARTS = contextlib.nullcontext()


class CallerState:
    """Autocast, grad mode and default device of the thread it was made in, to be entered in another. What else may be
    entered there is refused. `saves`: there will be backwards.
    """

    def __init__(self, *, saves: bool = True) -> None:
        _refuse_modes(saves=saves)
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        # A default device is a mode. Without any there is no need to look for it, which takes as long as a small layer.
        self._device = torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU
        self._autocast = AutocastState() if autocast_is_on() else None
        self._casts = casts_are_kept()
        self._heirs = Heirs()

    def entered(self) -> contextlib.AbstractContextManager[None]:
        ordinary = self._grad and not self._inference and not self._casts and self._heirs.are_ordinary
        return _AS_A_THREAD_STARTS if ordinary and self._device.type == "cpu" else self._set()

    @contextlib.contextmanager
    def _set(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._heirs.entered())
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            if self._casts:
                # All threads share autocast's casts. One that leaves autocast must not take them from the others.
                increment_nesting()
                stack.callback(decrement_nesting)
            if self._autocast is not None:
                stack.enter_context(self._autocast.replayed())
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            yield

    def leave(self) -> None:
        """All threads have left it. Casts that autocast has kept belong to this use of it: before the next the weights
        change.
        """
        if self._casts:
            clear_cache()


def _refuse_modes(*, saves: bool) -> None:
    """The default device is a mode too; and this pipeline may be called by a layer of another one."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
        for mode in modes:
            if not isinstance(mode, DeviceContext) and not type(mode).__module__.startswith("gapless."):
                fact = f"{type(mode).__name__} is entered around this call, and no device would see it"
                raise CALLERS_MODES.refusal(fact)
    if saves and _top_hooks(False) is not None:
        raise CALLERS_MODES.refusal(
            "saved-tensor hooks are entered around this step, and no device would see them",
            "use remat= to save memory, or enter them in the layers that need them",
        )
