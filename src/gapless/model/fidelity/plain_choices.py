"""A trace makes the choices that a plain call makes.

Some code looks whether it is traced, and then takes another path, which is as good but has other last bits: Hugging
Face's attention keeps a mask that it would skip, its experts take another product of matrices. Here it is told no.
And a cache of keys and values, which a graph can't return and training has no use for, is left out of the outputs;
the model still makes it, since what it computes depends on it (with a cache, packed sequences are not told apart).
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from gapless.model.traced.grouped import traceable_mm

from .thread_patches import instead

_LOOKS = ("is_compiling", "is_exporting", "is_dynamo_compiling")
_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_CHECKS = "torch_compilable_check"  # it is no choice: while traced it is written into the graph


@contextlib.contextmanager
def as_called(model: nn.Module) -> Iterator[None]:
    """While it holds, a model that this thread traces behaves as if it were called."""
    with contextlib.ExitStack() as stack:
        for name in _LOOKS:
            stack.enter_context(instead(torch.compiler, name, _only_to_torch))
        library = sys.modules.get("transformers.utils.import_utils")
        if hasattr(library, "is_fake_tensor"):
            stack.enter_context(instead(library, "is_fake_tensor", lambda *_: False))
        stack.enter_context(instead(torch, "_grouped_mm", traceable_mm))
        stack.callback(model.register_forward_hook(lambda *call: _without_caches(call[-1])).remove)
        yield


@contextlib.contextmanager
def spelled_out(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """While it holds, the forward of a model has these names among its parameters, where it takes them as **kwargs:
    torch.export knows no sizes that vary in there, and would trace every length of a batch anew.
    """
    forward, own = model.forward, model.__dict__
    signature = inspect.signature(forward)
    named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    others = [name for name in names if name not in {each.name for each in named}]
    if not others or len(named) == len(signature.parameters):
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    call.__signature__ = signature.replace(parameters=[*named, *more])  # type: ignore[attr-defined]
    before = {name: own[name] for name in ("forward",) if name in own}
    own["forward"] = call
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _only_to_torch(original: Callable[[], bool]) -> bool:
    """Torch itself learns the truth, and so does a check."""
    return original() and _is_told()


def _is_told() -> bool:
    frame: FrameType | None = sys._getframe(3)  # of whoever asks
    while frame is not None and frame.f_code.co_name in _LOOKS and _is_torchs(frame):
        frame = frame.f_back  # an older name of the same, which asks for its caller
    if frame is None:
        return False
    if _is_torchs(frame):
        return True
    for _ in range(3):
        if frame.f_code.co_name == _CHECKS:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _is_torchs(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == "torch"


def _without_caches(output: Any) -> Any:
    """What a Hugging Face model returns, with None for caches."""
    library = sys.modules.get("transformers")
    if library is None:
        return output
    if isinstance(output, library.Cache):
        return None
    if type(output) is tuple:
        return tuple(map(_without_caches, output))
    if isinstance(output, library.utils.ModelOutput):
        return type(output)(**{key: _without_caches(value) for key, value in output.items()})
    return output


def switches(model: nn.Module) -> list[str]:
    """Settings of a Hugging Face model that no graph can follow, as what to set instead."""
    modules = list(model.modules())
    configs = [getattr(module, "config", None) for module in modules]
    drops = [name for config in configs for name in _DROPS if _number(getattr(config, name, 0)) > 0]
    found = [f"{name}=0.0" for name in dict.fromkeys(drops)]
    if any(getattr(config, "apply_spec_augment", False) for config in configs):
        found.append("apply_spec_augment=False")
    has_experts = any("Experts" in type(module).__name__ for module in modules)
    if has_experts and any(getattr(config, "_experts_implementation", None) == "eager" for config in configs):
        found.append('experts_implementation="batched_mm"')
    return found


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
