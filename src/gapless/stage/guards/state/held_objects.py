"""What layers hold, looked at in every forward: attributes of modules, objects, lists, dicts and closures.

    held by the layers of one cell    before and after a forward: one that begins to change is told, as it was
    held by layers of two stages      against the start of the step: none may change, since another stage, which is at
                                      another microbatch, would see it too early, too late or, in a process of its own,
                                      never

To look costs as much as to compare two lists of references. Settings that all layers hold and nobody changes, as those
of Hugging Face's models, are looked at once per forward.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from .opaque_state import Opaque
from .state_notes import (
    LISTS,
    NOTHING,
    OWN,
    Entries,
    Fields,
    Note,
    Variable,
    WithSlots,
    changed_keys,
    content_of,
    is_long,
)

_NUMBERS = (int, float, complex, str, bytes)


class Seen:
    """One of them as it was when it was looked at last."""

    __slots__ = ("_was_long", "before", "holder", "is_dict", "path", "source")

    def __init__(self, holder: Any, path: str) -> None:
        self.holder, self.path = holder, path
        self.source = holder.held if isinstance(holder, Entries) else holder
        self.is_dict = isinstance(self.source, (dict, WithSlots))
        self.look()

    def look(self) -> None:
        self.before, self._was_long = self._read(), is_long(self.source)

    def stays(self) -> bool:
        """Whether it is as it was; what is in its place and equal is the same."""
        try:
            return self._read() == self.before
        except Exception:  # tensors and the like, which do not compare
            return False

    def _read(self) -> list[Any]:
        source: Any = self.source
        if isinstance(source, Tensor):
            return [source._version]
        if isinstance(source, types.CellType):
            return content_of(source)  # type: ignore[no-any-return]
        if is_long(source):  # only how many
            return [len(source)]
        if self.is_dict:
            return [*source, *source.values()]
        if isinstance(source, LISTS):
            return [*source]
        if isinstance(source, Variable):
            return source.read()
        return [source.access.glance(source.value)]

    def note(self) -> Note | None:
        """What has changed of it, as it was; no content where that is not known."""
        source, before = self.source, self.before
        if self.is_dict and not self._was_long:
            half = len(before) // 2
            was = dict(zip(before[:half], before[half:], strict=True))
            keys = [key for key in changed_keys(was, dict(source)) if not equal_numbers(was.get(key), source.get(key))]
            if not keys:
                return None
            holder = Fields(self.holder.owner, keys) if isinstance(self.holder, Fields) else self.holder
            content = {key: was.get(key, NOTHING) for key in keys} if isinstance(self.holder, Fields) else was
            return Note(holder, f"{self.path}.{keys[0]}" if isinstance(self.holder, Fields) else self.path, content)
        known = isinstance(source, (types.CellType, Variable, *LISTS)) and not self._was_long
        return Note(self.holder, self.path, before if known else None)

    def has_grown(self) -> bool:
        """Whether nothing was taken away, at least."""
        source = self.source
        return isinstance(source, LISTS) and (self._was_long or len(source) > len(self.before))


def can_be_seen(holder: Any) -> bool:
    """Whether a look in every forward costs little enough."""
    return not isinstance(holder, Opaque) or holder.access.glance is not None


def equal_numbers(before: Any, now: Any) -> bool:
    """Whether what has come in the place of a number or a string is the same."""
    return type(before) is type(now) and isinstance(before, _NUMBERS) and before == now


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
