"""What stands in the place of the model, where Trainer calls it: a proxy that answers one call, in training, and in
evaluation a model that runs on the pipeline.

Trainer computes a loss in one function: it calls the model, and makes a loss of what comes back. A pipeline needs the
two apart: the call for its first stage, the loss for its last. So the function runs twice, each time with something in
the place of the model. The first one ends it at the call, and keeps what the model was called with:

    compute_loss(model, inputs)      outputs = model(input_ids=..., labels=...)
                                               |  the pipeline runs
    compute_loss(model, inputs)      outputs = .                             loss = outputs["loss"]

That holds for label smoothing, for `compute_loss_func` and for a `compute_loss` of the user's own.
"""

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer

from gapless.errors import ConfigError
from gapless.guards.batches_and_losses import FETCHED_BATCHES
from gapless.hf.unsupported import CHECKPOINTING

Evaluate = Callable[[Sequence[Any]], Sequence[Any]]  # calls of the model, and what it returns for each


class ModelProxy:
    """It answers a call by itself; in all else it is the model."""

    def __init__(self, model: Any, answer: Callable[..., Any]) -> None:
        self._model, self._answer = model, answer

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # Trainer asks whether it is one of PEFT's
        return type(self._model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Called(BaseException):
    """No error, so nobody who catches errors takes it for one."""

    def __init__(self, call: Any) -> None:
        self.call = call


def call_in(function: Callable[[Any], Any], model: Any) -> Any:
    """What a function that takes a model calls it with, in the form that a pipeline takes; None if it does not."""
    try:
        function(ModelProxy(model, _caught))
    except _Called as caught:
        return caught.call
    return None


def answered(function: Callable[[Any], Any], model: Any, outputs: Any, call: Any = None) -> Any:
    """What the same function returns when the model has returned these outputs, for this `call` if it is known."""
    left = [outputs]

    def answer(*args: Any, **kwargs: Any) -> Any:
        if not left:
            raise ConfigError(
                "compute_loss calls the model a second time, but the pipeline has run it once: compute the loss from "
                "one call, or use transformers.Trainer"
            )
        if call is not None and not _same(call, args or kwargs, _alike):
            raise FETCHED_BATCHES.refusal(
                "compute_loss runs twice for a batch, and calls the model with other values the second time",
                "draw random numbers in the data collator, or use transformers.Trainer",
            )
        return left.pop()

    return function(ModelProxy(model, answer))


class UnchangingLoss:
    """The loss of a trainer that computes it as transformers does. A trainer changes in every step. This holds only
    what the loss reads of it, so that CUDA graphs, which do again what was captured, end with a change of that alone.
    """

    def __init__(self, trainer: Any, compute: Callable[[Any, Any, Any], Tensor]) -> None:
        self._trainer, self._compute = weakref.ref(trainer), compute
        self._read: list[Any] = []

    def __call__(self, outputs: Any, target: Any) -> Tensor:
        return self._compute(self._trainer(), outputs, target)

    def look(self) -> None:
        """Before a step."""
        trainer: Any = self._trainer()
        names = Trainer.compute_loss.__code__.co_names
        objects = [trainer, *(getattr(trainer, name, None) for name in names)]
        read = [getattr(each, name, None) for each in objects for name in names]
        self._read[:] = [each for each in read if isinstance(each, bool | int | float | str)]
        self._read += [trainer.label_smoother, trainer.compute_loss_func]
        if has_own_loss(trainer):  # by now
            self._read.append(trainer.state.global_step)


def has_own_loss(trainer: Any) -> bool:
    """Whether anything of how it computes its loss is the user's, which may read whatever a trainer has."""
    names = "compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager"
    return any(getattr(getattr(trainer, each), "__func__", None) is not getattr(Trainer, each) for each in names)


def contents(batch: Any) -> list[tuple[Any, int]]:
    """What is in a batch, and how often that was changed."""
    leaves = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [(each, each._version if isinstance(each, Tensor) else 0) for each in leaves]


def unchanged(seen: list[tuple[Any, int]], batch: Any) -> bool:
    """Whether a batch has what was `seen` in it."""
    now = contents(batch)
    return len(now) == len(seen) and all(
        a is b and one == other for (a, one), (b, other) in zip(seen, now, strict=True)
    )


def _caught(*args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise ConfigError(
            "compute_loss calls the model with positional and keyword arguments: use keyword arguments only"
        )
    raise _Called(args or kwargs)


class PipelinedModel(nn.Module):
    """What Trainer takes for the model when it evaluates: it has the same parameters. Calls that were foreseen ran
    together; any other runs alone, with the same bits.
    """

    def __init__(self, model: nn.Module, evaluate: Evaluate) -> None:
        super().__init__()
        self.module = model
        self._evaluate = evaluate
        self._ready: deque[tuple[Any, Any]] = deque()

    def foresee(self, calls: Sequence[Any]) -> None:
        """These calls come next, in this order."""
        self._ready = deque(zip(calls, self._evaluate(calls), strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model, in eval mode."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "on a pipeline gradients are computed in training_step alone: override compute_loss instead, or use "
                "transformers.Trainer"
            )
        call = args or kwargs
        if self._ready and _same(self._ready[0][0], call, _equal):
            return self._ready.popleft()[1]
        self._ready.clear()
        return self._evaluate([call])[0]

    def _get_name(self) -> str:
        """That of the model, by which Trainer knows whether labels are shifted; PEFT's have another inside."""
        model: Any = self.module
        return str((model.get_base_model() if hasattr(model, "get_base_model") else model)._get_name())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _same(one: Any, other: Any, equal: Callable[[Any, Any], bool]) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, its = pytree.tree_flatten(other)
    return spec == its and all(a is b or equal(a, b) for a, b in zip(leaves, others, strict=True))


def _alike(one: Any, other: Any) -> bool:
    """But for rounding: other threads may add in another order, on another device."""
    other = other.to(one.device) if isinstance(one, Tensor) and isinstance(other, Tensor) else other
    if not (isinstance(one, Tensor) and one.is_floating_point() and one.numel()) or one.shape != other.shape:
        return _equal(one, other)
    one, other = one.nan_to_num(), other.nan_to_num()
    return bool((one - other).abs().max() <= 1e-3 * one.abs().max())


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def checkpoints(model: Any) -> bool:
    """Whether it recomputes activations itself, which the stages do instead."""
    return bool(getattr(model, f"is_{CHECKPOINTING}", False))
