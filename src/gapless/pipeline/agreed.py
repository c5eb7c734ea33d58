"""What the ranks of a mesh tell each other while they make a pipeline: that they mean the same, or that one can't."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

from torch import nn

P = ParamSpec("P")


def told_to_all(make: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A pipeline that can't be made on one rank, whose others wait for it there: they are told, and it is closed."""

    @wraps(make)
    def init(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            make(self, *args, **kwargs)
        except BaseException as error:
            world, close = getattr(self, "_world", None), getattr(self, "_close", None)
            if world is not None and close is not None:
                world.refuse(error)
                close()
            raise
        self._world.made()

    return init


def named(value: Any) -> str:
    """A function, by its name; anything else as it is."""
    if callable(value):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return repr(value)


def described(module: nn.Module) -> dict[str, str]:
    """Names, shapes and types of all tensors of a model."""
    tensors = {
        **{name: (each, "" if each.requires_grad else ", frozen") for name, each in module.named_parameters()},
        **{name: (each, ", a buffer") for name, each in module.named_buffers()},
    }
    return {
        name: f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}{word}"
        for name, (each, word) in tensors.items()
    }
