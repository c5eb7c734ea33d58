"""What layers of two stages can reach: none of it may change while a step runs.

held by both           against the start of the step: another stage, which is at another microbatch, would see a
                       change too early, too late or, in a process of its own, never
reached by their code  global variables, attributes of classes: nothing is said, unless remat runs a forward again,
                       for which they can't be put back while others use them
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gapless.errors import GaplessError
from gapless.guards.held_state import SHARED_STATE
from gapless.stage.split.interception import has_hooks, is_torchs

from .held_objects import Seen, can_be_seen
from .opaque_state import Opaque
from .reachable_state import Path, Walk, named
from .shared_logs import is_log
from .state_notes import OWN, Fields, Note, holds_tensors, key_of

_MOST_VISITED = 65536


class Holder(NamedTuple):
    """A layer, or the loss, which comes after the last. Of layers with other `key`s one is at another microbatch."""

    key: object
    number: int
    part: Any

    @property
    def name(self) -> str:
        """For people."""
        return f"layer {self.number} ({type(self.part).__name__})"


class Objects:
    """Those that the layers of a cell alone can reach, but for what is in an attribute of a module: who looks at that
    sees it too. Where they are run again, also what others reach by their code: it can't be put back.
    """

    def __init__(self, key: object, modules: Collection[nn.Module]) -> None:
        """`key` is that of its layers, and `modules` those whose attributes are looked at."""
        self._key, self._modules = key, {id(module): module for module in modules}
        self.seen: list[Seen] = []
        self.of_others: list[Seen] = []
        self._shared: SharedObjects | None = None

    def find(self, shared: SharedObjects) -> None:
        """A step begins: those that were found and that nobody else holds."""
        direct = {
            id(value)
            for module in self._modules.values()
            for value in module.__dict__.values()
            if isinstance(value, list | dict | Tensor)
        }
        found = [
            (key, Seen(holder, path))
            for key, (holder, path) in shared.reached_by(self._key)
            if can_be_seen(holder) and key not in direct and key not in shared.holders
            if not (isinstance(holder, Fields) and id(holder.owner) in self._modules)
        ]
        self._shared = shared
        self.seen = [seen for key, seen in found if key not in shared.around]
        self.of_others = [seen for key, seen in found if key in shared.around] if is_apart(self._key) else []

    def changed(self) -> list[Note]:
        """It has ended: what it has changed."""
        moved = [each for each in self.seen if not each.stays()]
        if self.of_others and self._shared is not None:
            self._shared.check_around(self.of_others)
        return [note for each in moved if (note := each.note()) is not None]

    def forget(self) -> None:
        """Nobody looks until they are looked for: what was held may die."""
        self.seen, self.of_others, self._shared = [], [], None


def is_apart(key: object) -> bool:
    """Whether its layers run again without others of their stage."""
    return isinstance(key, tuple)


class SharedObjects:
    """Those that layers with two keys hold, and modules that two of them use."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._layers: Sequence[Holder] = ()
        self.holders: dict[Any, tuple[Holder, Holder]] = {}  # by `key_of` who holds it
        self._held: dict[object, dict[Any, Path]] = {}  # what layers of a key hold, by `key_of`, and its path
        # What their code reaches is looked for in the first steps, and then less and less often.
        # By numbers of layers: layers and stages themselves would be held from step to step, in a circle.
        self._in_code: dict[int, dict[Any, Path]] = {}
        self.around: dict[Any, tuple[int, int]] = {}  # of that by `key_of` what is not of one key alone, and whose
        self._found, self._next_look = 0, 0
        self.lent: set[nn.Module] = set()  # modules of one stage that another one can read
        self.modules: set[nn.Module] = set()  # of all layers

    def find(self, layers: Sequence[Holder]) -> None:
        """A step begins: looks for them, and at them."""
        self._layers = layers
        contained = [list(each.part.modules()) if isinstance(each.part, nn.Module) else [] for each in layers]
        self.modules = {module for modules in contained for module in modules}
        self.seen, self.holders, self._held, self.lent = [], {}, {}, set()
        looks = self._found >= self._next_look
        if looks:
            self._in_code, self.around, self._next_look = {}, {}, 2 * self._found
        self._found += 1
        first: dict[Any, tuple[Holder, str]] = {}
        walks = [Walk(_roots([each]), self._met, most=_MOST_VISITED, follows=looks) for each in layers]
        for each, walk in zip(layers, walks, strict=True):
            own = self._held.setdefault(each.key, {})
            for _, holder, path in walk.held():
                if holder is None:
                    continue
                key = key_of(holder)
                other, its_path = first.setdefault(key, (each, path))
                own.setdefault(key, (holder, path))
                if other.key is not each.key and key not in self.holders and _is_between(holder):
                    self.seen.append(Seen(holder, its_path))
                    self.holders[key] = other, each
        for each, walk in zip(layers, walks, strict=True) if looks else ():
            own = self._in_code.setdefault(each.number, {})
            for _, holder, path in walk.around():
                if holder is not None:
                    key = key_of(holder)
                    other, _ = first.setdefault(key, (each, path))
                    own.setdefault(key, (holder, path))
                    if other.key is not each.key and key not in self.holders:
                        self.around.setdefault(key, (other.number, each.number))

    def reached_by(self, key: object) -> Iterable[tuple[Any, Path]]:
        """What layers of this key can reach, by `key_of`."""
        found: dict[Any, Path] = {}
        for each in self._layers:
            if each.key == key:
                found |= {name: path for name, path in self._in_code.get(each.number, {}).items() if name not in found}
        return {**found, **self._held.get(key, {})}.items()

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
        self.seen, self._layers, self.holders, self._held = [], (), {}, {}
        self.lent, self.modules = set(), set()

    def check(self) -> None:
        """While it runs: none has changed."""
        for each in self.seen:
            if each.stays() or (note := each.note()) is None or (path := self._changed(note)) is None:
                continue
            if self._is_log(each):
                self.seen = [other for other in self.seen if other is not each]
                continue
            raise self._refusal(note, path)

    def check_around(self, seen: list[Seen]) -> None:
        """What remat would have to put back while other stages use it: none has changed, but for logs, for tables that
        only grow and for tensors in them.
        """
        for each in [each for each in seen if not each.stays()]:
            if (note := each.note()) is not None and not self._is_log(each) and not _has_only_grown(each):
                raise self._refusal(note, note.path)

    def _is_log(self, seen: Seen) -> bool:
        if not seen.has_grown():
            return False
        walk = Walk(_roots(self._layers), self._met, most=_MOST_VISITED)
        return is_log(seen.holder, itertools.chain(walk.held(), walk.around()))

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
        key = key_of(note.holder)
        numbered = {each.number: each for each in self._layers}
        one, other = self.holders[key] if key in self.holders else map(numbered.__getitem__, self.around[key])
        both, way = "layers of two stages", "put both into one stage with partition="
        if isinstance(one.key, tuple) and isinstance(other.key, tuple) and one.key[0] is other.key[0]:
            both, way = "two layers that remat='layer' runs again one by one", "use remat='stage'"
        return SHARED_STATE.refusal(
            f"{path} was changed while a step was under way, and {both} hold it, {one.name} and {other.name}, which "
            "would see the change at another time than in plain training",
            f"{SHARED_STATE.way_out}, or {way}",
        )


def _is_between(holder: Any) -> bool:
    """Whether it is looked at where two stages hold it."""
    return not isinstance(holder, Opaque) or holder.access.between_stages


def _has_only_grown(seen: Seen) -> bool:
    """Whether it is a dict in which nothing was replaced but tensors."""
    source, before = seen.source, seen.before
    if not isinstance(source, dict):
        return False
    now, half = dict(source), len(before) // 2
    return all(
        key in now and (now[key] is value or holds_tensors(now[key]))
        for key, value in zip(before[:half], before[half:], strict=False)
    )


def _roots(layers: Iterable[Holder]) -> list[Path]:
    """Their modules, with names, but for torch's own, which keep nothing."""
    found = named(layer.part for layer in layers)
    plain = {kind for kind in {type(part) for part, _ in found} if is_torchs(kind)}
    return [each for each in found if type(each[0]) not in plain or has_hooks(each[0])]
