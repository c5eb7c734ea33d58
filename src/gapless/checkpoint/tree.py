"""Trees of values as JSON, with tensors left out: the manifest holds what JSON can, files hold the rest.

    {"lr": 0.1, "betas": (0.9, 0.999), "moment": tensor}
    {"lr": 0.1, "betas": {"$tuple": [0.9, 0.999]}, "moment": {"$tensor": "optim.weight.moment"}}

A dict with one key that begins with `$` is never a user's: theirs, if they have such keys, are written as pairs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gapless.errors import CheckpointError

Json = Any
_SHOWN = 60  # characters of a value


def encode(value: Any, place: str, put: Callable[[str, Tensor], str]) -> Json:
    """`put` takes a tensor and its place in the tree, and returns the name it is stored under."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": put(place, value)}
    if type(value) is list:
        return [encode(each, f"{place}.{number}", put) for number, each in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(each, f"{place}.{number}", put) for number, each in enumerate(value)]}
    if isinstance(value, Mapping) and (type(value) is dict or type(value).__name__ == "OrderedDict"):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(each, f"{place}.{key}", put) for key, each in value.items()}
        pairs = [[encode(key, place, _no_tensor), encode(each, f"{place}.{key}", put)] for key, each in value.items()]
        return {"$dict": pairs}
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, and a checkpoint holds only tensors, numbers, strings, None, lists, "
        "tuples and dicts of these: turn it into one of them, or leave it out"
    )


def _no_tensor(place: str, tensor: Tensor) -> str:
    raise CheckpointError(f"{place} has a tensor as a key, which no checkpoint can hold: use a number or a string")


def decode(value: Json, get: Callable[[str], Any]) -> Any:
    """The tree again; `get` returns a tensor by the name it is stored under."""
    if isinstance(value, list):
        return [decode(each, get) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "") if len(value) == 1 else ""
    if not kind.startswith("$"):
        return {key: decode(each, get) for key, each in value.items()}
    inner = value[kind]
    if kind == "$tensor":
        return get(inner)
    if kind == "$float":
        return float(inner)
    if kind == "$tuple":
        return tuple(decode(each, get) for each in inner)
    if kind == "$dict":
        return {decode(key, get): decode(each, get) for key, each in inner}
    raise CheckpointError(f"the manifest has a value of the unknown kind {kind!r:.40}: a newer gapless wrote it")


def merged(trees: Sequence[Json], owners: Sequence[str]) -> Json:
    """What all ranks have together: each its own part, and where several have one, they agree. `owners` are their names
    in an error.
    """
    return _merged(list(zip(trees, owners, strict=True)), "")


def _merged(found: list[tuple[Json, str]], place: str) -> Json:
    first, owner = found[0]
    if all(isinstance(each, dict) for each, _ in found):
        keys = dict.fromkeys(key for each, _ in found for key in each)
        return {
            key: _merged([(each[key], name) for each, name in found if key in each], _at(place, key)) for key in keys
        }
    if all(isinstance(each, list) and len(each) == len(first) for each, _ in found):
        return [
            _merged([(each[number], name) for each, name in found], _at(place, str(number)))
            for number in range(len(first))
        ]
    for other, name in found[1:]:
        if other != first or type(other) is not type(first):
            raise CheckpointError(
                f"the ranks disagree: {place} is {first!r:.{_SHOWN}} on {owner} and {other!r:.{_SHOWN}} on {name}; "
                "make the same calls with the same arguments on all ranks"
            )
    return first


def _at(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def keys_in(value: Json) -> Iterator[str]:
    """The places of all keys of an encoded tree."""
    return (place for place, _, _ in _items(value, ""))


def tensors_in(value: Json) -> Iterator[str]:
    """The names of all tensors of an encoded tree."""
    return (each for _, key, each in _items(value, "") if key == "$tensor")


def _items(value: Json, place: str) -> Iterator[tuple[str, str, Json]]:
    """All keys of the dicts in it, each with its place and what it leads to."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _items(each, _at(place, str(number)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield _at(place, key), key, each
            yield from _items(each, _at(place, key))
