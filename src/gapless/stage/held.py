"""What layers hold besides parameters and buffers: counters and averages in attributes, lists, objects, closures.

Objects that several threads may use (with a lock in them), and those of torch and of Python's library, are not theirs.
"""

import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .compiled import is_traced

_OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, buffers, hooks
_SIMPLE = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, torch.dtype, torch.Size)
)
_LISTS = (list, deque, set, bytearray)
_LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__", "types", "collections", "random", "functools"}) | {
    "torch"
}
_THREADING = ("_thread", "threading")
_MOST = 4096  # entries of a list that is noted in every forward
_ABSENT = object()


class Note(NamedTuple):
    """What can change, where it is, and what is in it now."""

    holder: Any
    path: str
    content: Any


class _Attributes:
    """The attributes of an object, without those that every module has."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.keys: Iterable[str] | None = None  # those that matter, once it is known

    def read(self) -> dict[str, Any]:
        held = self.owner.__dict__
        if self.keys is not None:
            return {key: held.get(key, _ABSENT) for key in self.keys}
        own: Any = _OWN if isinstance(self.owner, nn.Module) else ()
        return {key: value for key, value in list(held.items()) if key not in own}

    def write(self, content: dict[str, Any]) -> None:
        held = self.owner.__dict__
        for key in self.read().keys() | content.keys():
            if content.get(key, _ABSENT) is _ABSENT:
                held.pop(key, None)
            else:
                held[key] = content[key]


class Held:
    """What some layers hold."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = [part for part in parts if not is_traced(part)]
        self._known: list[Note] | None = None  # what was seen to change, by the first forward

    def taken(self, everything: bool) -> list[Note]:
        """Before a run: what is known to change in it, or everything that could."""
        if everything:
            return self.all()
        if self._known:
            self._known = [each for each in self._known if not _is_long(each.holder)]
        return [each._replace(content=_content(each.holder)) for each in self._known or ()]

    def put_back(self, taken: list[Note]) -> None:
        """The run does not count."""
        for holder, _, content in taken:
            if not _same(holder, content):
                _write(holder, content)

    def learn(self, everything: list[Note]) -> None:
        """After a run that counts."""
        self._known = [each for each in everything if not _same(each.holder, each.content)]
        for each in self._known:
            if isinstance(each.holder, _Attributes):
                each.holder.keys = _changed_keys(each.content, each.holder.read())

    @property
    def is_known(self) -> bool:
        """Whether a run has told what changes."""
        return self._known is not None

    def all(self) -> list[Note]:
        """All that could change."""
        return list(_all(self._parts))

    def twice(self, before: list[Note]) -> list[str]:
        """What such a run has changed, but for what is known: the run before it has done so too."""
        known = {id(_owner(each.holder)): each.holder for each in self._known or ()}
        return [
            name
            for each in before
            if not _same(each.holder, each.content)
            for name in _names(each, known.get(id(_owner(each.holder))))
        ]


def _all(parts: Sequence[Any]) -> Iterator[Note]:
    """All that can be reached from them and can change."""
    seen: set[int] = set()
    to_visit: list[tuple[Any, str]] = [(part, type(part).__name__) for part in parts]
    while to_visit:
        value, path = to_visit.pop()
        if type(value) in _SIMPLE or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            to_visit += [(part, f"{path}.{name}") for name, part in value._modules.items() if part is not None]
        holder = _holder(value)
        if holder is not None:
            content = _content(holder)
            yield Note(holder, path, content)
        else:
            content = _parts(value)
        if isinstance(content, dict):
            to_visit += [(each, f"{path}.{key}") for key, each in content.items()]
        elif holder is None or isinstance(content, list):
            to_visit += [(each, f"{path}[{number}]") for number, each in enumerate(content)]


def _holder(value: Any) -> Any:
    """What has contents that can be noted and put back; None where it has none."""
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.grad_fn is None and value.layout == torch.strided
        return value if plain and not (value.is_meta or value.is_inference()) else None
    if isinstance(value, (dict, types.CellType, random.Random, *_LISTS)) or _is_array(value):
        return value
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type):
        return None
    if not isinstance(value, nn.Module):
        if type(value).__module__.partition(".")[0] in _LIBRARIES:
            return None
        if any(type(each).__module__ in _THREADING for each in attributes.values()):
            return None
    return _Attributes(value)


def _parts(value: Any) -> Any:
    """What stands behind a thing that can't change itself."""
    if isinstance(value, types.FunctionType):
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()), value.__dict__)
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    return tuple(value) if isinstance(value, (tuple, frozenset)) else ()


def _content(holder: Any) -> Any:
    if isinstance(holder, _Attributes):
        return holder.read()
    if isinstance(holder, Tensor):
        return holder._version, holder.detach().clone()
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, _LISTS):
        return list(holder)
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # nothing is in it yet
            return []
    return holder.getstate() if isinstance(holder, random.Random) else holder.copy()


def _same(holder: Any, content: Any) -> bool:
    """Whether nothing has changed. What a list holds is noted by itself."""
    if isinstance(holder, Tensor):
        is_nan = holder.isnan() & content[1].isnan()
        return holder._version == content[0] and bool(((holder == content[1]) | is_nan).all())
    now = _content(holder)
    if isinstance(now, dict):
        return not _changed_keys(content, now)
    if isinstance(now, list):
        return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))
    return bool(now == content) if isinstance(now, tuple) else bool(now.tobytes() == content.tobytes())


def _changed_keys(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if before.get(key, _ABSENT) is not now.get(key, _ABSENT)]


def _write(holder: Any, content: Any) -> None:
    if isinstance(holder, _Attributes):
        holder.write(content)
    elif isinstance(holder, Tensor):
        with torch.no_grad():
            holder.copy_(content[1])
    elif isinstance(holder, types.CellType):
        holder.cell_contents = content[0]
    elif isinstance(holder, (dict, deque, set, list, bytearray)):
        holder.clear()
        (holder.update if isinstance(holder, (dict, set)) else holder.extend)(content)
    elif isinstance(holder, random.Random):
        holder.setstate(content)
    else:
        holder[...] = content


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _is_long(holder: Any) -> bool:
    """Too long to be noted in every forward."""
    return isinstance(holder, (dict, *_LISTS)) and len(holder) > _MOST


def _owner(holder: Any) -> Any:
    return holder.owner if isinstance(holder, _Attributes) else holder


def _names(note: Note, known: Any) -> list[str]:
    """What has changed, but for what is `known` to."""
    if not isinstance(note.holder, _Attributes):
        return [] if known is not None else [note.path]
    keys = _changed_keys(note.content, note.holder.read())
    return [f"{note.path}.{key}" for key in keys if known is None or key not in known.keys]
