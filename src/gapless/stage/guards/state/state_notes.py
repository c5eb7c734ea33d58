"""What can change of what an object holds: attributes, entries, contents, each noted so that it can be put back.

A holder is what has such contents:

    Tensor, dict, list, deque, set, bytearray, cell    itself
    Fields                                             the attributes of an object, those in slots too
    Variable                                           a global variable, or an attribute of a class
    Opaque                                             what has none of these, see `opaque_state`
"""

import copyreg
import types
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .opaque_state import MOST, Opaque

NOTHING = object()
OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, buffers, hooks
LISTS = (list, deque, set, bytearray)


def holds_tensors(value: Any) -> bool:
    """A tensor, or a list or dict with one in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (
        isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)
    )


class Note(NamedTuple):
    """What can change, where it is, and what is in it now."""

    holder: Any
    path: str
    content: Any


class WithSlots(MutableMapping[str, Any]):
    """The attributes of an object with slots, as those of others are: in a dict."""

    __slots__ = ("_names", "_owner", "_rest")

    def __init__(self, owner: Any) -> None:
        self._owner, self._rest = owner, getattr(owner, "__dict__", {})
        self._names = slots_of(type(owner))

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        yield from [name for name in self._names if self.get(name, NOTHING) is not NOTHING]
        yield from list(self._rest)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def slots_of(kind: type) -> list[str]:
    """The names of those that a class has, with its bases."""
    return copyreg._slotnames(kind)  # type: ignore[attr-defined, no-any-return]


class Entries:
    """Some of the entries of a dict."""

    def __init__(self, held: MutableMapping[Any, Any], keys: Iterable[Any] | None) -> None:
        self.held, self.keys = held, keys

    def read(self) -> dict[Any, Any]:
        return {key: self.held.get(key, NOTHING) for key in self.keys or ()}

    def write(self, content: dict[Any, Any]) -> None:
        for key, value in content.items():
            if value is NOTHING:
                self.held.pop(key, None)
            else:
                self.held[key] = value


class Fields(Entries):
    """The attributes of an object, without those that every module has; `keys` are those that matter, if known."""

    def __init__(self, owner: Any, keys: Iterable[str] | None = None) -> None:
        super().__init__(WithSlots(owner) if slots_of(type(owner)) else owner.__dict__, keys)
        self.owner = owner

    def read(self) -> dict[Any, Any]:
        if self.keys is not None:
            return super().read()
        own: Any = OWN if isinstance(self.owner, nn.Module) else ()
        return {key: value for key, value in list(self.held.items()) if key not in own}

    def write(self, content: dict[Any, Any]) -> None:
        now = content if self.keys is not None else self.read()
        super().write({**dict.fromkeys(now, NOTHING), **content})


class Variable:
    """A name that code may give another value: a global variable, or an attribute of a class."""

    __slots__ = ("name", "space")

    def __init__(self, space: Any, name: str) -> None:
        self.space, self.name = space, name

    def read(self) -> list[Any]:
        held = self.space.__dict__ if isinstance(self.space, type) else self.space
        return [held[self.name]] if self.name in held else []

    def write(self, content: list[Any]) -> None:
        if not isinstance(self.space, type):
            Entries(self.space, ()).write({self.name: content[0] if content else NOTHING})
        elif content:
            setattr(self.space, self.name, content[0])
        elif self.name in self.space.__dict__:
            delattr(self.space, self.name)


def key_of(holder: Any) -> Any:
    """The same for all holders of the same contents."""
    if isinstance(holder, Variable):
        return id(holder.space), holder.name
    if isinstance(holder, Fields):
        return "fields", id(holder.owner)
    return id(holder.value) if isinstance(holder, Opaque) else id(holder)


def is_long(holder: Any) -> bool:
    """Too long to be looked at in every forward."""
    return isinstance(holder, (dict, *LISTS)) and len(holder) > MOST


def content_of(holder: Any) -> Any:
    """What is in it now."""
    if isinstance(holder, (Entries, Variable, Opaque)):
        return holder.read()
    if isinstance(holder, Tensor):
        return holder._version, holder.detach().clone()
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # nothing is in it yet
            return []
    return list(holder)


def same(holder: Any, content: Any) -> bool:
    """Whether nothing has changed. What a list holds is noted by itself."""
    if isinstance(content, Tensor):
        return False
    if isinstance(holder, Tensor):
        is_nan = holder.isnan() & content[1].isnan()
        return holder._version == content[0] and bool(((holder == content[1]) | is_nan).all())
    now = content_of(holder)
    if isinstance(now, dict):
        return not changed_keys(content, now) and (isinstance(holder, Entries) or [*content] == [*now])
    if isinstance(now, list):
        return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))
    if hasattr(now, "tobytes"):
        return bool(now.tobytes() == content.tobytes())
    return bool(now == content)


def changed_keys(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    """Of entries that were set or taken away."""
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if before.get(key, NOTHING) is not now.get(key, NOTHING)]


def can_be_put_back(holder: Any) -> bool:
    """What can't is noted too, so that it is known whether it has changed."""
    return not isinstance(holder, Opaque) or holder.access.write is not None


def write(holder: Any, content: Any) -> None:
    """Puts it back. A tensor gets other memory, if that is its content, or other numbers."""
    if isinstance(holder, (Entries, Variable)):
        holder.write(content)
    elif isinstance(holder, Opaque):
        if holder.access.write is not None:
            holder.access.write(holder.value, content)
    elif isinstance(content, Tensor):
        holder.data = content
    elif isinstance(holder, Tensor):
        with torch.no_grad():
            holder.copy_(content[1])
    elif isinstance(holder, types.CellType):
        if content:
            holder.cell_contents = content[0]
        else:
            del holder.cell_contents
    else:
        holder.clear()
        (holder.update if isinstance(holder, (dict, set)) else holder.extend)(content)
