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
from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

from torch import Tensor, nn

from gapless.errors import GaplessError
from gapless.guards.held_state import SHARED_STATE
from gapless.stage.split.interception import is_torchs

from .shared_logs import is_log
from .state_notes import (
    LISTS,
    MOST,
    NOTHING,
    OWN,
    Entries,
    Fields,
    Note,
    changed_keys,
    content_of,
    holds_tensors,
    is_long,
    owner_id,
    reached,
    visited,
)

_MOST_VISITED = 65536
_NUMBERS = (int, float, complex, str, bytes)


class Holder(NamedTuple):
    """A layer, or the loss, which comes after the last. Of layers with other `key`s one is at another microbatch."""

    key: object
    number: int
    part: Any

    @property
    def name(self) -> str:
        """For people."""
        return f"layer {self.number} ({type(self.part).__name__})"


class Seen:
    """One of them as it was when it was looked at last."""

    __slots__ = ("_was_long", "before", "holder", "is_dict", "path", "source")

    def __init__(self, holder: Any, path: str) -> None:
        self.holder, self.path = holder, path
        self.source = holder.held if isinstance(holder, Entries) else holder
        self.is_dict = isinstance(self.source, dict)
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
        if isinstance(source, dict):
            return [*source, *source.values()]
        if isinstance(source, LISTS):
            return [*source]
        return [source.tobytes() if source.nbytes <= MOST else None]

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
        known = isinstance(source, (types.CellType, *LISTS)) and not self._was_long
        return Note(self.holder, self.path, before if known else None)

    def has_grown(self) -> bool:
        """Whether nothing was taken away, at least."""
        source = self.source
        return isinstance(source, LISTS) and (self._was_long or len(source) > len(self.before))


def equal_numbers(before: Any, now: Any) -> bool:
    """Whether what has come in the place of a number or a string is the same."""
    return type(before) is type(now) and isinstance(before, _NUMBERS) and before == now


class Objects:
    """Those that the layers of a cell alone hold, but for what is in an attribute of a module: who looks at that sees
    it too.
    """

    def __init__(self, key: object, modules: Collection[nn.Module]) -> None:
        """`key` is that of its layers, and `modules` those whose attributes are looked at."""
        self._key, self._modules = key, modules
        self.seen: list[Seen] = []

    def find(self, shared: SharedObjects) -> None:
        """A step begins: those that were found and that nobody else holds."""
        direct = {
            id(value)
            for module in self._modules
            for value in module.__dict__.values()
            if isinstance(value, list | dict | Tensor)
        }
        self.seen = [
            Seen(holder, path)
            for owner, (holder, path) in shared.held.get(self._key, {}).items()
            if not (isinstance(holder, Random) or owner in direct or owner in shared.holders)
            if not (isinstance(holder, Fields) and isinstance(holder.owner, nn.Module))
        ]

    def changed(self) -> list[Note]:
        """It has ended: what it has changed."""
        moved = [each for each in self.seen if not each.stays()]
        return [note for each in moved if (note := each.note()) is not None]

    def forget(self) -> None:
        """Nobody looks until they are looked for: what was held may die."""
        self.seen = []


class SharedObjects:
    """Those that layers with two keys hold, and modules that two of them use."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._layers: Sequence[Holder] = ()
        self.holders: dict[int, tuple[Holder, Holder]] = {}  # by id who holds it
        self.held: dict[object, dict[int, tuple[Any, str]]] = {}  # what layers of a key hold, by id, and its path
        self.lent: set[nn.Module] = set()  # modules of one stage that another one can read
        self.modules: set[nn.Module] = set()  # of all layers

    def find(self, layers: Sequence[Holder]) -> None:
        """A step begins: looks for them, and at them."""
        self._layers = layers
        contained = [list(each.part.modules()) if isinstance(each.part, nn.Module) else [] for each in layers]
        self.modules = {module for modules in contained for module in modules}
        first: dict[int, tuple[Holder, str]] = {}
        self.seen, self.holders, self.held, self.lent = [], {}, {}, set()
        for each in layers:
            own = self.held.setdefault(each.key, {})
            for holder, path in reached(_roots([each]), self._met, most=_MOST_VISITED):
                owner = owner_id(holder)
                other, its_path = first.setdefault(owner, (each, path))
                own.setdefault(owner, (holder, path))
                if other.key is not each.key and owner not in self.holders and not isinstance(holder, Random):
                    self.seen.append(Seen(holder, its_path))
                    self.holders[owner] = other, each

    def _met(self, module: nn.Module) -> bool:
        """A module that is not a part of the layer from which it is reached: those of other layers are looked at by
        these.
        """
        if module in self.modules:
            self.lent.add(module)
            return False
        return True

    def forget(self) -> None:
        """The step has ended."""
        self.seen, self._layers, self.holders, self.held = [], (), {}, {}
        self.lent, self.modules = set(), set()

    def check(self) -> None:
        """While it runs: none has changed."""
        for each in self.seen:
            if each.stays() or (note := each.note()) is None or (path := self._changed(note)) is None:
                continue
            if each.has_grown() and is_log(each.holder, visited(_roots(self._layers), self._met, most=_MOST_VISITED)):
                self.seen = [other for other in self.seen if other is not each]
                continue
            raise self._refusal(note, path)

    def _changed(self, note: Note) -> str | None:
        """Which of it should not have. Tensors in attributes of layers are guarded by themselves (`stored_tensors`),
        and what torch has in every module changes when its user says so.
        """
        holder = note.holder
        if not isinstance(holder, Fields):
            return note.path
        keys = [key for key in holder.keys or () if not (isinstance(holder.owner, nn.Module) and key in OWN)]
        if holder.owner in self.modules:
            keys = [k for k in keys if not holds_tensors(holder.held.get(k)) and not holds_tensors(note.content[k])]
        return f"{note.path.rpartition('.')[0]}.{keys[0]}" if keys else None

    def _refusal(self, note: Note, path: str) -> GaplessError:
        one, other = self.holders[owner_id(note.holder)]
        both, way = "layers of two stages", "put both into one stage with partition="
        if isinstance(one.key, tuple) and isinstance(other.key, tuple) and one.key[0] is other.key[0]:
            both, way = "two layers that remat='layer' runs again one by one", "use remat='stage'"
        return SHARED_STATE.refusal(
            f"{path} was changed while a step was under way, and {both} hold it, {one.name} and {other.name}, which "
            "would see that at another time than in plain training",
            f"{SHARED_STATE.way_out}, or {way}",
        )


def _roots(layers: Iterable[Holder]) -> list[tuple[Any, str]]:
    """Their modules, with names."""
    found: list[tuple[Any, str]] = []
    known: dict[type, bool] = {}  # whether a class is torch's own, whose modules keep nothing
    for each in layers:
        name = type(each.part).__name__
        parts = each.part.named_modules() if isinstance(each.part, nn.Module) else [("", each.part)]
        for path, part in parts:
            kind = type(part)
            if kind not in known:
                known[kind] = is_torchs(kind)
            if not known[kind]:
                found.append((part, f"{name}.{path}" if path else name))
    return found
