"""The calls of a batch norm, answered: by the mode of a stage, and in a plain loop by one of its own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.overrides import TorchFunctionMode

from gapless.stage.split.call_signature import bound, opened, signature_of

from .running_statistics import Moments, Statistics, refuse

_open_backward = opened(torch.autograd.backward)
_FUNCTIONAL = signature_of(F.batch_norm)
_OPERATOR = dict.fromkeys(
    ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled")
)


class Answering(Protocol):
    """What the handlers need of a mode."""

    statistics: Statistics

    def plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it is."""


class PlainMode(TorchFunctionMode):
    """The mode of the reference loop: it answers the calls below and no others."""

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.backward:  # of a checkpoint inside another
            with self:
                return _open_backward(*args, **kwargs or {})
        handler = HANDLERS.get(func)
        if handler is None or detect_fake_mode() is not None:  # a model that is being traced computes nothing
            return self.plain(func, args, kwargs or {})
        return handler(self, func, args, kwargs or {})

    def plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it is."""
        return func(*args, **kwargs)


def checkpointed(times: int, *args: Any) -> Any:
    """A batch norm in a traced graph, where so many checkpoints were around it: a plain loop runs it again as often."""
    return torch.batch_norm(*args)


def checkpointed_count(times: int, counter: Tensor, *args: Any) -> Tensor:
    """The same of its counter, which may be another stage's."""
    return counter.add_(*args)


def _checkpointed(mode: Answering, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _batch_norm(mode, torch.batch_norm, args[1:], kwargs, args[0])


def _checkpointed_count(mode: Answering, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    times, counter = args[:2]
    if mode.statistics.is_counter(counter) and not mode.statistics.raises(counter):
        return counter
    return counter.add_(1 if mode.statistics.option == "deferred" else 1 + times)


def _batch_norm(
    mode: Answering, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], times: int | None = None
) -> Any:
    """`F.batch_norm`, which torch's modules call, and the operator below it, which a traced graph calls."""
    given = bound(_FUNCTIONAL if func is F.batch_norm else _OPERATOR, args, kwargs)
    statistics, running_mean, running_var = mode.statistics, given["running_mean"], given["running_var"]
    statistics.asked += 1
    if given["training"] and statistics.option == "error":
        refuse("batch_norm")
    if not given["training"] or running_mean is None or running_var is None:
        return mode.plain(func, args, kwargs)
    counts = statistics.counts(running_mean)
    statistics.moved.add(id(running_var))
    if not counts:
        statistics.computed_again(running_mean)
        if statistics.is_put_back(running_mean):
            return mode.plain(func, args, kwargs)
        # As many tensors are saved as by the first call: a checkpoint compares that.
        apart = given | {"running_mean": running_mean.clone(), "running_var": running_var.clone()}
        return mode.plain(func, tuple(apart.values()), {})
    repeats = statistics.repeats(running_mean, times)
    if statistics.option != "deferred":
        result = mode.plain(func, args, kwargs)
        for _ in range(repeats):
            with torch.no_grad():
                factor = given["momentum"] if times is not None else statistics.factor(running_mean, given["momentum"])
                func(*(given | {"momentum": factor}).values())
        return result
    # An update of zeros with all the weight on the new leaves the moments themselves, as the kernel computed them.
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    moved = given | {"running_mean": mean, "running_var": var, "momentum": 1.0}
    result = mode.plain(func, tuple(moved.values()), {})
    size = given["input"].numel() // given["input"].size(1)
    statistics.note(Moments(running_mean, running_var, given["momentum"], size, mean, var))
    return result


def _add(mode: Answering, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`counter.add_(1)`, with which a batch norm counts."""
    tensor = args[0]
    if tensor.dim() == 0 and mode.statistics.is_counter(tensor) and not mode.statistics.raises(tensor):
        return tensor
    return mode.plain(func, args, kwargs)


@contextlib.contextmanager
def recomputed(statistics: Statistics) -> Iterator[None]:
    """Around a backward in which checkpoints compute again what has counted."""
    with statistics.recomputing(), PlainMode(statistics):
        yield


HANDLERS: dict[Any, Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    checkpointed: _checkpointed,
    checkpointed_count: _checkpointed_count,
    **dict.fromkeys((F.batch_norm, torch.batch_norm, torch.ops.aten.batch_norm.default), _batch_norm),
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__, torch.ops.aten.add_.Tensor), _add),
}
