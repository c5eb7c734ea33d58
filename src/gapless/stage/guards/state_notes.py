"""What can change of what an object holds: attributes, entries, contents, each noted so that it can be put back.

Objects that several threads may use (with a lock in them), and those of torch, of gapless and of Python's library are
not noted.
"""

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NOTHING = object()
OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, buffers, hooks
_SIMPLE = frozenset(
    (int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, torch.dtype, torch.Size)
)
LISTS = (list, deque, set, bytearray)
MOST = 4096  # entries or bytes of what is looked at in every forward
LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__", "types", "collections", "random", "functools"}) | {
    "torch",
    "gapless",
}
_THREADING = ("_thread", "threading")


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


class Entries:
    """Some of the entries of a dict."""

    def __init__(self, held: dict[Any, Any], keys: Iterable[Any] | None) -> None:
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
        super().__init__(owner.__dict__, keys)
        self.owner = owner

    def read(self) -> dict[Any, Any]:
        if self.keys is not None:
            return super().read()
        own: Any = OWN if isinstance(self.owner, nn.Module) else ()
        return {key: value for key, value in list(self.held.items()) if key not in own}

    def write(self, content: dict[Any, Any]) -> None:
        now = content if self.keys is not None else self.read()
        super().write({**dict.fromkeys(now, NOTHING), **content})


def owner_id(holder: Any) -> int:
    """Of what has it, by which two holders are told to be one."""
    return id(holder.owner if isinstance(holder, Fields) else holder)


def is_long(holder: Any) -> bool:
    """Too long to be looked at in every forward."""
    return isinstance(holder, (dict, *LISTS)) and len(holder) > MOST


def notes_of(parts: Sequence[Any]) -> Iterator[Note]:
    """All that can be reached from them and can change."""
    for holder, path in reached([(part, type(part).__name__) for part in parts]):
        yield Note(holder, path, content_of(holder))


def reached(
    parts: Iterable[tuple[Any, str]], meet: Callable[[nn.Module], bool] | None = None, *, most: int = sys.maxsize
) -> Iterator[tuple[Any, str]]:
    """What holds something that can change, and its path from them, as in `visited`."""
    return ((holder, path) for _, holder, path in visited(parts, meet, most=most) if holder is not None)


def visited(
    parts: Iterable[tuple[Any, str]], meet: Callable[[nn.Module], bool] | None = None, *, most: int = sys.maxsize
) -> Iterator[tuple[Any, Any, str]]:
    """All that can be reached from them, with what holds something in it that can change, or None, and its path; the
    nearest first, and `most` of it. With `meet`, only the given modules are looked into, without their own parts, and
    others that are met if it says so.
    """
    to_visit = deque(parts)
    given, seen = {id(value) for value, _ in to_visit}, set[int]()
    while to_visit and len(seen) < most:
        value, path = to_visit.popleft()
        if type(value) in _SIMPLE or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if meet is None:
                to_visit += [(part, f"{path}.{name}") for name, part in value._modules.items() if part is not None]
            elif id(value) not in given and not meet(value):
                continue
        holder = _holder(value)
        yield value, holder, path
        content: Any = ()
        if holder is None:
            content = _parts(value)
        else:
            if not isinstance(holder, (Tensor, random.Random)) and not _is_array(holder):
                content = content_of(holder)
        if isinstance(content, dict):
            to_visit += [(each, f"{path}.{key}") for key, each in content.items() if type(each) not in _SIMPLE]
        else:
            to_visit += [(each, f"{path}[{n}]") for n, each in enumerate(content) if type(each) not in _SIMPLE]


def _holder(value: Any) -> Any:
    """What has contents that can be noted and put back; None where it has none."""
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.grad_fn is None and value.layout == torch.strided
        return value if plain and not (value.is_meta or value.is_inference()) else None
    if isinstance(value, (dict, types.CellType, random.Random, *LISTS)) or _is_array(value):
        return value
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, type):
        return None
    if not isinstance(value, nn.Module):
        if type(value).__module__.partition(".")[0] in LIBRARIES:
            return None
        if any(type(each).__module__ in _THREADING for each in attributes.values()):
            return None
    return Fields(value)


def _parts(value: Any) -> Any:
    """What stands behind a thing that can't change itself."""
    if isinstance(value, types.FunctionType):
        return (*(value.__closure__ or ()), *(value.__defaults__ or ()), value.__dict__)
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    return tuple(value) if isinstance(value, (tuple, frozenset)) else ()


def content_of(holder: Any) -> Any:
    """What is in it now."""
    if isinstance(holder, Entries):
        return holder.read()
    if isinstance(holder, Tensor):
        return holder._version, holder.detach().clone()
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, LISTS):
        return list(holder)
    if isinstance(holder, types.CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # nothing is in it yet
            return []
    return holder.getstate() if isinstance(holder, random.Random) else holder.copy()


def same(holder: Any, content: Any) -> bool:
    """Whether nothing has changed. What a list holds is noted by itself."""
    if isinstance(content, Tensor):
        return False
    if isinstance(holder, Tensor):
        is_nan = holder.isnan() & content[1].isnan()
        return holder._version == content[0] and bool(((holder == content[1]) | is_nan).all())
    now = content_of(holder)
    if isinstance(now, dict):
        return not changed_keys(content, now)
    if isinstance(now, list):
        return len(now) == len(content) and all(a is b for a, b in zip(now, content, strict=True))
    return bool(now == content) if isinstance(now, tuple) else bool(now.tobytes() == content.tobytes())


def changed_keys(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    """Of entries that were set or taken away."""
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if before.get(key, NOTHING) is not now.get(key, NOTHING)]


def write(holder: Any, content: Any) -> None:
    """Puts it back. A tensor gets other memory, if that is its content, or other numbers."""
    if isinstance(holder, Entries):
        holder.write(content)
    elif isinstance(content, Tensor):
        holder.data = content
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


class Was(NamedTuple):
    """An attribute before a forward has changed it: what it was, and what was in it, if that is what has changed."""

    value: Any
    inside: Any


class Watched:
    """The attributes of a module, as they were when it was looked at last."""

    __slots__ = ("held", "inside", "module", "names", "size", "values")

    def __init__(self, module: nn.Module, *, names: Sequence[str] | None = None) -> None:
        self.module, self.held = module, module.__dict__
        self.names = [name for name in self.held if name not in OWN] if names is None else list(names)
        self.look()

    def look(self) -> None:
        self.values, self.size = [*map(self.held.get, self.names)], len(self.names) + len(OWN)
        self.inside = [(each, _inside(each)) for each in self.values if isinstance(each, list | dict | Tensor)]

    def look_anew(self) -> None:
        self.names = [name for name in self.held if name not in OWN]
        self.look()

    def forget(self) -> None:
        """Nobody looks until `look_anew`: what stood there may die."""
        self.values, self.inside = [], []

    def changed(self) -> list[tuple[str, Was]]:
        """Those that were set since, or changed where they are, and what they were."""
        held, names, values = self.held, self.names, self.values
        inside = [(each, before) for each, before in self.inside if not _same(_inside(each), before)]
        altered = {id(each): before for each, before in inside}
        stay = len(held) == self.size and all(map(is_, map(held.get, names), values))
        if stay and not altered:
            return []
        before = dict(zip(names, values, strict=True))
        found = [(name, Was(value, altered[id(value)])) for name, value in before.items() if id(value) in altered]
        self.names = [name for name in held if name not in OWN]
        found += [
            (name, Was(value, None))
            for name in dict.fromkeys([*names, *self.names])
            if held.get(name, NOTHING) is not (value := before.get(name, NOTHING))
        ]
        self.look()
        return found


def _inside(value: Any) -> Any:
    """What tells of a change in place."""
    if isinstance(value, Tensor):
        return value._version
    return [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]


def _same(now: Any, before: Any) -> bool:
    return now == before if isinstance(now, int) else len(now) == len(before) and all(map(is_, now, before))
