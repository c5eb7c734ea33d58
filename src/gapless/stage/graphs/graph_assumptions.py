"""What a CUDA graph takes for granted: it does again what was captured, whatever the Python code would do by now."""

import functools
from collections import OrderedDict
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gapless.stage.calls import Calls
from gapless.stage.compiled import is_optimized, is_traced
from gapless.stage.guards.state.state_notes import content_of
from gapless.stage.settings import settings
from gapless.stage.split.interception import has_hooks

from .code_run import CodeRun, is_source

_NUMBERS = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple, set))
_OWN = ("_parameters", "_buffers", "_modules")
_DEPTH = 3  # of what is inside of lists, functions and objects


class Unchanged:
    """The tensors, the numbers and the settings that the calls of a stage depend on, as they are now. Tensors are held:
    their ids stay their own, and a graph never reads memory that is somebody else's by now.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._held: list[Any] = []
        self._read: set[int] = set()  # functions whose globals are among the facts, by id
        self._facts = [settings(), _backends(), *(fact for part in parts for fact in self._of(part, _DEPTH))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unchanged) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]

    def _of(self, part: Any, depth: int) -> list[Any]:
        if type(part) in _NUMBERS:
            return [part]
        if isinstance(part, Tensor):
            return [self._of_tensor(part)]
        if isinstance(part, nn.Module):
            return self._of_module(part, depth)
        if isinstance(part, CodeRun):
            return [fact for each in part.values() for fact in self._of(each, 1)]
        if not depth:
            return []
        self._held.append(part)
        return [
            id(part),
            *(fact for each in (*_inside(part), *self._globals_of(part)) for fact in self._of(each, depth - 1)),
        ]

    def _globals_of(self, part: Any) -> list[Any]:
        """What the code of a function reads of its module, once."""
        function = getattr(part, "__func__", part)
        code = getattr(function, "__code__", None)
        if code is None or id(function) in self._read or _is_of_torch(function.__module__):
            return []
        self._read.add(id(function))
        found = [function.__globals__[name] for name in code.co_names if name in function.__globals__]
        modules = [each for each in found if isinstance(each, ModuleType) and not _is_of_torch(each.__name__)]
        found += [getattr(each, name) for each in modules for name in code.co_names if hasattr(each, name)]
        return [each for each in found if not isinstance(each, type | ModuleType)]

    def _of_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        self._held.append(tensor)
        if tensor.layout != torch.strided:
            return (id(tensor),)
        made = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad
        return (id(tensor), *made, tensor._version if tensor.is_cpu else None)  # its numbers are part of the graph

    def _of_module(self, part: nn.Module, depth: int) -> list[Any]:
        # A traced layer has parameters of modules that are not its own.
        facts: list[Any] = [self._of_tensor(each) for each in part.parameters()]
        for module in part.modules():
            facts.append((id(module), module.training))
            facts += [self._of_tensor(each) for each in module._buffers.values() if each is not None]
            if not is_traced(module):
                if not _is_of_torch(type(module).__module__):
                    facts += self._of(type(module).forward, depth)
                for name, value in module.__dict__.items():
                    if type(value) in _NUMBERS:
                        facts.append(value)
                    elif name not in _OWN and not (type(value) in _CONTAINERS and not value):
                        facts += self._of(value, depth - 1 if depth else 0)
        return facts


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("builtins", "torch")


def _inside(part: Any) -> Sequence[Any]:
    """What a list, a dict, a function or an object of the user's holds."""
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, dict):
        return list(part.values())
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords.values()]
    closure = getattr(part, "__closure__", None) or ()
    cells = [each for cell in closure for each in content_of(cell)]
    defaults = [*(getattr(part, "__defaults__", None) or ()), *(getattr(part, "__kwdefaults__", None) or {}).values()]
    bound = getattr(part, "__self__", None)
    if callable(part) and (cells or defaults or bound is not None):
        return [*cells, *defaults, *([] if bound is None else [bound])]
    own = None if _is_of_torch(type(part).__module__) else getattr(part, "__dict__", None)
    return list(own.values()) if isinstance(own, dict) else []


def _backends() -> tuple[Any, ...]:
    """Which kernels torch may choose."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.allow_tf32,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.allow_tf32,
        torch.is_anomaly_enabled(),
    )


def why_not(parts: Sequence[Any], parameters: Sequence[nn.Parameter]) -> str | None:
    """What of these layers a graph would leave out, if there is anything."""
    for module in (each for part in parts if isinstance(part, nn.Module) for each in part.modules()):
        name = type(module).__name__
        if has_hooks(module) and not is_optimized(module):
            return f"its {name} has hooks, or a forward of its own"
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            return f"its {name} counts what it sees"
        if any(map(is_source, module.__dict__.values())):
            return f"its {name} draws random numbers, and a graph would repeat them"
        own = (each for each in module.__dict__.values() if isinstance(each, Tensor))
        for tensor in (*module._parameters.values(), *module._buffers.values(), *own):
            if tensor is not None and (tensor.layout != torch.strided or tensor.is_inference()):
                return f"a tensor of its {name} is sparse, or was made in inference mode"
    for parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a parameter has hooks"
        if type(parameter) is not nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}"
    return None


def why_no_call(calls: Calls) -> str | None:
    """What of the calls of a stage can't be captured, if there is anything."""
    if calls.statistics.moved:
        return "a batch norm counts what it sees"
    if calls.mode.alone:
        return "a layer draws in a way that can't be seen"
    return None


def why_too_large(parameters: Sequence[nn.Parameter]) -> str | None:
    """Whether graphs may not fit: they keep what a step needs at its peak, and the gradients of one microbatch."""
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    needed = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    needed += 2 * sum(each.numel() * each.element_size() for each in parameters)
    if needed <= free:
        return None
    return f"its GPU has {free / 2**30:.1f} GiB free, and graphs might take {needed / 2**30:.1f} GiB"
