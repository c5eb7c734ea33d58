"""What layers hold besides parameters and buffers: counters and averages in attributes, lists, objects, closures.

first forward     all is noted; it tells what changes
every forward     what is known to change is noted, before and after; attributes of modules that begin to are told
second run        for remat: starts from what the first has started from, and leaves no trace
backward          finds what its forward has left, for a checkpoint in it that runs a layer again
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gapless.errors import GaplessError
from gapless.guards.held_state import RECOMPUTED_STATE
from gapless.stage.compiled import is_traced

from .held_objects import Was
from .opaque_state import Opaque
from .reachable_state import Walk, named
from .shared_objects import SharedObjects
from .state_notes import (
    NOTHING,
    Entries,
    Fields,
    Note,
    can_be_put_back,
    changed_keys,
    content_of,
    holds_tensors,
    is_long,
    key_of,
    same,
    write,
)


class Held:
    """What some layers hold. With `always`, what is known to change is noted however long it is."""

    def __init__(self, parts: Sequence[Any], shared: SharedObjects, *, always: bool = False) -> None:
        self._parts = [part for part in parts if not is_traced(part)]
        self._always, self._shared = always, shared
        self._known: list[Note] | None = None  # what was seen to change

    def taken(self, everything: bool = False) -> list[Note]:
        """Before a run: what is known to change in it, or everything that could."""
        if everything:
            return self.all()
        if self._known and not self._always:
            self._known = [each for each in self._known if not is_long(each.holder)]
        return [each._replace(content=content_of(each.holder)) for each in self._known or ()]

    def put_back(self, taken: list[Note], *, but: Collection[int] = ()) -> list[str]:
        """The run does not count, `but` for what of tensors (by id) is counted elsewhere. Returns what can't be put
        back, and so does for a cache whose function has changed something: it will not do so again.
        """
        changed = [each for each in taken if id(each.holder) not in but and not same(each.holder, each.content)]
        keys = {key_of(each.holder) for each in changed}
        lost = [each.path for each in changed if not can_be_put_back(each.holder) and _matters(each.holder, keys)]
        for holder, _, content in changed:
            write(holder, content)
        return lost

    def learn(self, everything: list[Note]) -> list[Note]:
        """After a run that counts. Returns what is known to change, as it was before."""
        for each in everything:
            if not same(each.holder, each.content):
                holder = each.holder
                if self._always and not can_be_put_back(holder) and not holder.is_cache:
                    raise _unreadable(each.path, "a forward has moved")
                if isinstance(holder, Fields):
                    holder = Fields(holder.owner, changed_keys(each.content, holder.read()))
                self._know([each._replace(holder=holder)])
        self._known, before = self._known or [], {key_of(each.holder): each.content for each in everything}
        return [
            each._replace(content={key: content.get(key, NOTHING) for key in each.holder.keys or ()})
            if isinstance(each.holder, Entries)
            else each._replace(content=content)
            for each in self._known
            if (content := before.get(key_of(each.holder))) is not None
        ]

    def begun(
        self, attributes: Iterable[tuple[nn.Module, str, Was]], objects: Iterable[Note]
    ) -> tuple[list[Note], list[str]]:
        """Fields that a run was the first to change, as they were; and those of which nobody knows what they were.
        Of these and of those that are known already nothing is noted. `objects`: what it has changed in such.
        """
        found, lost = [], []
        for each in objects:
            if not self._knows(each.holder):
                self._know([each._replace(content=None)])
                if each.content is None and can_be_put_back(each.holder):
                    lost.append(each.path)
                elif each.content is None:
                    if self._always:
                        raise _unreadable(each.path, "a forward has moved")
                else:
                    found.append(each)
        for module, name, was in attributes:
            path, holder, content = f"{type(module).__name__}.{name}", was.value, was.inside
            if content is None:
                holder, content = Fields(module, [name]), {name: was.value}
            elif isinstance(holder, dict):
                content = dict(zip(content, content[len(content) // 2 :], strict=False))
            if not self._knows(holder):
                self._know([Note(holder, path, None)])
                if isinstance(holder, Tensor):
                    lost.append(path)
                else:
                    found.append(Note(holder, path, content))
        return found, lost

    def _know(self, found: list[Note]) -> None:
        self._known = [*(self._known or ()), *(each for each in found if not self._knows(each.holder))]

    def _knows(self, holder: Any) -> bool:
        """Whether all of it is known to change."""
        keys = self._known_keys().get(key_of(holder), ())
        return keys is None or (isinstance(holder, Fields) and {*(holder.keys or ())} <= {*keys})

    def _known_keys(self) -> dict[Any, set[str] | None]:
        """By the key of what changes its attributes that do; None: it is no such thing."""
        found: dict[Any, set[str] | None] = {}
        for each in self._known or ():
            keys = found.setdefault(key_of(each.holder), set() if isinstance(each.holder, Fields) else None)
            if keys is not None:
                keys.update(each.holder.keys or ())
        return found

    @property
    def is_known(self) -> bool:
        """Whether a run has told what changes."""
        return self._known is not None

    @property
    def changes(self) -> bool:
        """Whether something is known to."""
        return bool(self._known)

    def all(self, *, of_others: bool = False) -> list[Note]:
        """All that could change. `of_others`: also what layers of other stages reach, which can't be put back."""
        walk = Walk(named(self._parts), lambda module: module not in self._shared.modules)
        reached = [(holder, path) for _, holder, path in (*walk.held(), *walk.around()) if holder is not None]
        found = [Note(*each, content_of(each[0])) for each in reached]
        if self._always:
            for each in found:
                if isinstance(each.holder, Opaque) and each.holder.is_unknown:
                    raise _unreadable(each.path, f"a layer or the loss holds a {type(each.holder.value).__name__} in")
        return found if of_others else [each for each in found if key_of(each.holder) not in self._shared.around]

    def twice(self, before: list[Note]) -> list[str]:
        """What such a run has changed, but for what is known: the run before it has done so too."""
        known = self._known_keys()
        return [
            name
            for each in before
            if not same(each.holder, each.content) and not (isinstance(each.holder, Opaque) and each.holder.is_cache)
            for name in _names(each, known.get(key_of(each.holder), set()))
        ]

    @contextlib.contextmanager
    def replayed(self, before: list[Note]) -> Iterator[None]:
        """Around a second run, which starts from what the first has started from, and leaves no trace."""
        # A tensor gets other memory meanwhile: what is written to it would count as a change.
        present = [
            each._replace(content=each.holder.data if isinstance(each.holder, Tensor) else content_of(each.holder))
            for each in self._known or ()
        ]
        self.put_back(before)
        try:
            yield
        finally:
            self.put_back(present)

    @contextlib.contextmanager
    def as_left(self, after: list[Note]) -> Iterator[list[str]]:
        """Around a backward, which finds what the forward of its microbatch has left. Yields the names of what later
        forwards have changed and this backward too, once it is over.
        """
        moved = [each for note in after if can_be_put_back(note.holder) for each in _moved(note)]
        moved += [
            note._replace(content=content_of(note.holder))
            for note in after
            if not (can_be_put_back(note.holder) or note.holder.is_cache or same(note.holder, note.content))
        ]
        present = [each._replace(content=content_of(each.holder)) for each in moved]
        changed: list[str] = []
        self.put_back(moved)
        try:
            yield changed
        finally:
            changed += [each.path for each in moved if not same(each.holder, each.content)]
            self.put_back(present)


def for_replay(notes: Iterable[Note]) -> Iterator[Note]:
    """The same without graphs, and with memory in place of the contents of tensors."""
    for each in notes:
        content = each.content
        if isinstance(each.holder, Entries):
            content = {key: _detached(value) for key, value in content.items()}
        yield each._replace(content=content[1] if isinstance(each.holder, Tensor) else content)


def without_tensors(notes: Iterable[Note]) -> Iterator[Note]:
    """The same without tensors in attributes, which a backward may not read (`stored_tensors`)."""
    for each in notes:
        if isinstance(each.holder, Tensor):
            continue
        if isinstance(each.holder, Fields) and isinstance(each.holder.owner, nn.Module):
            content = {key: value for key, value in each.content.items() if not holds_tensors(value)}
            if content:
                yield each._replace(holder=Entries(each.holder.held, list(content)), content=content)
        else:
            yield each


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.grad_fn is not None else value


def _moved(note: Note) -> Iterator[Note]:
    """What has changed of it."""
    holder, path, content = note
    if same(holder, content):
        return
    if isinstance(content, dict) and not isinstance(holder, Opaque):
        keys = changed_keys(content, content_of(holder))
        held = holder.held if isinstance(holder, Entries) else holder
        holder, content = Entries(held, keys), {key: content.get(key, NOTHING) for key in keys}
        path = f"{path}.{keys[0]}" if isinstance(note.holder, Entries) else path
    yield Note(holder, path, content)


def _matters(holder: Any, changed: set[Any]) -> bool:
    """Whether it is no cache, or one of what has `changed` something."""
    if not holder.is_cache:
        return True
    walk = Walk([(holder.value.__wrapped__, "")])
    return any(key_of(each) in changed for _, each, _ in (*walk.held(), *walk.around()) if each is not None)


def _unreadable(path: str, story: str) -> GaplessError:
    return RECOMPUTED_STATE.refusal(
        f"{story} {path}, which can't be put back where it was, and remat runs the forward again",
        "keep what it draws in a list or a number, or use remat='none' for its stage",
    )


def _names(note: Note, known: set[str] | None) -> list[str]:
    """What has changed, but for what is `known` to."""
    if not isinstance(note.holder, Fields):
        return [] if known is None else [note.path]
    keys = changed_keys(note.content, note.holder.read())
    return [f"{note.path}.{key}" for key in keys if key not in (known or ())]
