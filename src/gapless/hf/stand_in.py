"""In the place of the model, where Trainer calls it.

Trainer computes a loss in one function: it calls the model, and makes a loss of what comes back. A pipeline needs the
two apart: the call for its first stage, the loss for its last. So the function runs twice, each time with something in
the place of the model. The first one ends it at the call, and keeps what the model was called with:

    compute_loss(model, inputs)      outputs = model(input_ids=..., labels=...)
                                               |  the pipeline runs
    compute_loss(model, inputs)      outputs = .                             loss = outputs["loss"]

That holds for label smoothing, for `compute_loss_func` and for a `compute_loss` of the user's own.
"""

from collections.abc import Callable
from typing import Any

from gapless.errors import ConfigError


class StandIn:
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
        function(StandIn(model, _caught))
    except _Called as caught:
        return caught.call
    return None


def answered(function: Callable[[Any], Any], model: Any, outputs: Any) -> Any:
    """What the same function returns when the model has returned these outputs."""
    left = [outputs]

    def answer(*_: Any, **__: Any) -> Any:
        if not left:
            raise ConfigError(
                "compute_loss calls the model a second time, but the pipeline has run it once: compute the loss from "
                "one call, or use transformers.Trainer"
            )
        return left.pop()

    return function(StandIn(model, answer))


def _caught(*args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise ConfigError(
            "compute_loss calls the model with positional and keyword arguments: use keyword arguments only"
        )
    raise _Called(args or kwargs)
