"""What a trace would lose without a word: it keeps the calls of the forward, and the state of torch in which they are
made is gone when they run. Grad modes and autocast are kept by torch.export, inference mode is kept here, and anything
else is refused.
"""

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from .thread_patches import instead

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
_VMAP = torch._C._functorch.TransformType.Vmap


class LostError(Exception):
    """A trace would lose something that the gradients or the numbers depend on."""


@contextlib.contextmanager
def nothing_lost() -> Iterator[None]:
    """While it holds, this thread may do nothing that a trace loses."""
    drawn = _drawn_outside()
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (Tensor, "register_hook", _refuse_hook),
        (Tensor, "register_post_accumulate_grad_hook", _refuse_hook),
        (saved_tensors_hooks, "__enter__", _enter_without_hooks_of_ones_own),
        (torch.inference_mode, "__enter__", _enter_inference),
        (torch.inference_mode, "__exit__", _leave_inference),
    ]
    with contextlib.ExitStack() as stack:
        for each in replaced:
            stack.enter_context(instead(*each))
        switches = stack.enter_context(_Switches())
        yield
    if switches.refusal is not None:  # which the model has caught
        raise switches.refusal
    if _drawn_outside() != drawn:
        raise LostError(
            "it draws from the generators of Python or NumPy, and a trace would use the same numbers for all "
            "microbatches: draw with torch"
        )


def _refuse_hook(*_: Any, **__: Any) -> Any:
    raise LostError("register_hook of a tensor, which a trace would lose")


class _GraphNode:
    """Stands for a node of autograd's graph, whose own class can't be changed: it takes no hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise LostError(
                f"{name} of a node of autograd's graph, as register_backward_hook of a module calls it, which a trace "
                "would lose"
            )
        found = getattr(self._node, name)
        if name != "next_functions":
            return found
        return tuple((None if node is None else _GraphNode(node), number) for node, number in found)

    def __eq__(self, other: object) -> bool:
        return self._node is (other._node if isinstance(other, _GraphNode) else other)

    def __hash__(self) -> int:
        return hash(self._node)


def _enter_without_hooks_of_ones_own(original: Any, hooks: Any) -> Any:
    """Torch's own kinds change where tensors are kept, not what they are."""
    if type(hooks) is saved_tensors_hooks:
        raise LostError("saved_tensors_hooks, which a trace would lose")
    return original(hooks)


def _enter_inference(original: Any, mode: Any) -> None:
    """Inference mode leaves no mark in a trace; grad mode, which it switches too, does."""
    mode._graded = torch.is_grad_enabled()
    original(mode)
    torch._C._set_grad_enabled(not mode.mode)


def _leave_inference(original: Any, mode: Any, *error: Any) -> None:
    original(mode, *error)
    torch._C._set_grad_enabled(mode._graded)


@contextlib.contextmanager
def levels_left() -> Iterator[None]:
    """Around a trace: if it fails, torch is in none of the transforms in which it was stopped."""
    functions, depth = torch._C._functorch, torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if functions.get_dynamic_layer_stack_depth() > depth:
            functions.pop_dynamic_layer_stack_and_undo_to_depth(depth)


class _Switches(TorchFunctionMode):
    """Notices calls that are made under other switches of torch than the caller's, or under a transform that
    differentiates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = _switches()
        self.refusal: LostError | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.refusal is None:  # then what is still called leaves the levels and settings that were entered
            fault = self._fault(func)
            if fault is not None:
                self.refusal = LostError(fault)
                raise self.refusal
        made = func(*args, **(kwargs or {}))
        return made if made is None or func != _GRAD_FN else _GraphNode(made)

    def _fault(self, func: Any) -> str | None:
        top = torch._C._functorch.peek_interpreter_stack()
        if func in _GRADIENTS or (top is not None and top.key() != _VMAP):
            return "it computes gradients in its forward (torch.func or autograd.grad), which no trace can keep"
        for name, value in _switches().items():
            if value != self._before[name]:
                return f"for a part of its forward it sets {name} to {value}, which a trace would lose"
        return None


def _switches() -> dict[str, Any]:
    """Which kernels torch takes."""
    cuda = torch.backends.cuda
    return {
        "flash attention": cuda.flash_sdp_enabled(),
        "memory-efficient attention": cuda.mem_efficient_sdp_enabled(),
        "attention by plain products": cuda.math_sdp_enabled(),
        "attention of cuDNN": cuda.cudnn_sdp_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the seed": torch.initial_seed(),
    }


def _drawn_outside() -> list[Any]:
    """The state of generators that are not torch's."""
    numpy: Any = sys.modules.get("numpy")
    return [random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))]
