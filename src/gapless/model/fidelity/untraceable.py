"""What a trace would lose without a word: it keeps the calls of the forward, and the state of torch in which they are
made is gone when they run. Grad modes and autocast are kept by torch.export, inference mode is kept here, and anything
else is refused.
"""

import contextlib
import functools
import pickle
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from gapless.stage.guards.held_objects import Seen
from gapless.stage.guards.state_notes import OWN, Fields, Note, content_of, holds_tensors, reached, write

from .thread_patches import instead

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_UNSEEN = (Tensor, random.Random)
_OF_A_TRACE = (torch.SymInt, torch.SymFloat, torch.SymBool)
_VMAP = torch._C._functorch.TransformType.Vmap


class LostError(Exception):
    """A trace would lose something that the gradients or the numbers depend on."""


@contextlib.contextmanager
def nothing_lost(stored: list[tuple[nn.Module, str]]) -> Iterator[None]:
    """While it holds, this thread may do nothing that a trace loses. The attributes in which modules store tensors
    meanwhile are put into `stored`: nothing will store them when the trace runs.
    """
    drawn = _drawn_outside()
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (Tensor, "register_hook", _refuse_hook),
        (saved_tensors_hooks, "__enter__", _enter_without_hooks_of_ones_own),
        (torch.inference_mode, "__enter__", _enter_inference),
        (torch.inference_mode, "__exit__", _leave_inference),
        (nn.Module, "__setattr__", functools.partial(_note, stored)),
    ]
    with contextlib.ExitStack() as stack:
        for each in replaced:
            stack.enter_context(instead(*each))
        stack.enter_context(_Switches())
        yield
    if _drawn_outside() != drawn:
        raise LostError(
            "it draws from the generators of Python or NumPy, and a trace would have one number for all microbatches: "
            "draw with torch"
        )


class Changed(NamedTuple):
    """What a forward has changed in attributes, lists and objects: as it was, and what it has left there."""

    before: Note
    after: Any

    def put_back(self) -> None:
        if self.before.content is not None:
            write(self.before.holder, self.before.content)

    def set_again(self) -> None:
        write(self.before.holder, self.after)

    def matters(self, reads: Mapping[nn.Module, Collection[str]]) -> bool:
        """Whether the forward may go by it. Of what is in objects and lists nobody knows whether it is read."""
        holder = self.before.holder
        owner = holder.owner if isinstance(holder, Fields) else None
        return not isinstance(owner, nn.Module) or any(name in reads.get(owner, ()) for name in self.before.content)

    def can_stay(self) -> bool:
        """Whether what it has left means something after the trace."""
        left = [*self.after.values()] if isinstance(self.after, dict) else self.after
        known = self.before.content is not None and isinstance(left, list)
        return known and not any(isinstance(each, _OF_A_TRACE) or holds_tensors(each) for each in left)


@contextlib.contextmanager
def state_put_back(model: nn.Module, changed: list[Changed]) -> Iterator[None]:
    """Around its forward: what that changes is put back, and into `changed`. A trace has it as it was for this one
    batch, and changes nothing when it runs. Tensors in attributes are `stored`.
    """
    found = [Seen(*each) for each in reached([(model, type(model).__name__)]) if not isinstance(each[0], _UNSEEN)]
    try:
        yield
    finally:
        for each in found:
            if not each.stays() and (note := each.note()) is not None:
                changed += [Changed(part, content_of(part.holder)) for part in _parts(note)]
        for one in changed:
            one.put_back()


def _parts(note: Note) -> Iterator[Note]:
    """What counts of it, each attribute of a module by itself."""
    holder, path, content = note
    if not isinstance(holder, Fields) or not isinstance(holder.owner, nn.Module):
        yield note
        return
    for name in [name for name in holder.keys or () if name not in OWN]:
        if not holds_tensors(holder.held.get(name)) and not holds_tensors(content[name]):
            yield Note(Fields(holder.owner, [name]), f"{path.rpartition('.')[0]}.{name}", {name: content[name]})


def _refuse_hook(*_: Any, **__: Any) -> Any:
    raise LostError("register_hook of a tensor, which a trace would lose")


def _enter_without_hooks_of_ones_own(original: Any, hooks: Any) -> Any:
    """Torch's own kinds change where tensors are kept, not what they are."""
    if type(hooks) is saved_tensors_hooks:
        raise LostError("saved_tensors_hooks, which a trace would lose")
    return original(hooks)


def _note(stored: list[tuple[nn.Module, str]], original: Any, module: nn.Module, name: str, value: Any) -> None:
    original(module, name, value)
    if isinstance(value, Tensor) and name in module.__dict__:
        stored.append((module, name))


def _enter_inference(original: Any, mode: Any) -> None:
    """Inference mode leaves no mark in a trace; grad mode, which it switches too, does."""
    mode._graded = torch.is_grad_enabled()
    original(mode)
    torch._C._set_grad_enabled(not mode.mode)


def _leave_inference(original: Any, mode: Any, *error: Any) -> None:
    original(mode, *error)
    torch._C._set_grad_enabled(mode._graded)


class _Switches(TorchFunctionMode):
    """Notices calls that are made under other switches of torch than the caller's, or under a transform that
    differentiates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = _switches()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        top = torch._C._functorch.peek_interpreter_stack()
        if func in _GRADIENTS or (top is not None and top.key() != _VMAP):
            raise LostError(
                "it computes gradients in its forward (torch.func or autograd.grad), which no trace can keep"
            )
        for name, value in _switches().items():
            if value != self._before[name]:
                raise LostError(f"for a part of its forward it sets {name} to {value}, which a trace would lose")
        return func(*args, **(kwargs or {}))


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
