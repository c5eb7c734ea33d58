"""Torch's functions by their names, and the arguments of a call by theirs, however they were given."""

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def signature_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The names of a function's arguments in order, each with its default, or None."""
    parameters = inspect.signature(function).parameters.values()
    return {each.name: None if each.default is each.empty else each.default for each in parameters}


def bound(signature: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, in the order of the signature."""
    return {**signature, **dict(zip(signature, args, strict=False)), **kwargs}


def functions_named(*places: Any, names: str) -> list[Callable[..., Any]]:
    """Those of these names, of any of these places, that this torch has."""
    return [getattr(place, name) for place in places for name in names.split() if hasattr(place, name)]


def opened(function: Any) -> Any:
    """A copy of one of torch's own Python functions that does not ask for modes, so that these see what it calls."""
    scope = {**function.__globals__, **dict.fromkeys(_ASKING, lambda *_: False)}
    copy: Any = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
