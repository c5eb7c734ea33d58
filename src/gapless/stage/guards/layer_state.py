"""What layers hold besides parameters and buffers: counters and averages in attributes, lists, objects, closures.

first forward     all is noted; it tells what changes
every forward     what is known to change is noted, before and after; attributes of modules that begin to are told
second run        for remat: starts from what the first has started from, and leaves no trace
backward          finds what its forward has left, for a checkpoint in it that runs a layer again
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gapless.stage.compiled import is_traced

from .state_notes import (
    NOTHING,
    Entries,
    Fields,
    Note,
    Was,
    changed_keys,
    content_of,
    holds_tensors,
    is_long,
    notes_of,
    owner_id,
    same,
    write,
)


class Held:
    """What some layers hold. With `always`, what is known to change is noted however long it is."""

    def __init__(self, parts: Sequence[Any], *, always: bool = False) -> None:
        self._parts = [part for part in parts if not is_traced(part)]
        self._always = always
        self._known: list[Note] | None = None  # what was seen to change

    def taken(self, everything: bool = False) -> list[Note]:
        """Before a run: what is known to change in it, or everything that could."""
        if everything:
            return self.all()
        if self._known and not self._always:
            self._known = [each for each in self._known if not is_long(each.holder)]
        return [each._replace(content=content_of(each.holder)) for each in self._known or ()]

    def put_back(self, taken: list[Note]) -> None:
        """The run does not count."""
        for holder, _, content in taken:
            if not same(holder, content):
                write(holder, content)

    def learn(self, everything: list[Note]) -> list[Note]:
        """After a run that counts. Returns what is known to change, as it was before."""
        for each in everything:
            if not same(each.holder, each.content):
                holder = each.holder
                if isinstance(holder, Fields):
                    holder = Fields(holder.owner, changed_keys(each.content, holder.read()))
                self._know([each._replace(holder=holder)])
        self._known, before = self._known or [], {owner_id(each.holder): each.content for each in everything}
        return [
            each._replace(content={key: content.get(key, NOTHING) for key in each.holder.keys or ()})
            if isinstance(each.holder, Entries)
            else each._replace(content=content)
            for each in self._known
            if (content := before.get(owner_id(each.holder))) is not None
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
                if each.content is None:
                    lost.append(each.path)
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
        keys = self._known_keys().get(owner_id(holder), ())
        return keys is None or (isinstance(holder, Fields) and {*(holder.keys or ())} <= {*keys})

    def _known_keys(self) -> dict[int, set[str] | None]:
        """By the id of what changes its attributes that do; None: it is no such thing."""
        found: dict[int, set[str] | None] = {}
        for each in self._known or ():
            keys = found.setdefault(owner_id(each.holder), set() if isinstance(each.holder, Fields) else None)
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

    def all(self) -> list[Note]:
        """All that could change."""
        return list(notes_of(self._parts))

    def twice(self, before: list[Note]) -> list[str]:
        """What such a run has changed, but for what is known: the run before it has done so too."""
        known = self._known_keys()
        return [
            name
            for each in before
            if not same(each.holder, each.content)
            for name in _names(each, known.get(owner_id(each.holder), set()))
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
        moved = [each for note in after for each in _moved(note)]
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
    if isinstance(content, dict):
        keys = changed_keys(content, content_of(holder))
        held = holder.held if isinstance(holder, Entries) else holder
        holder, content = Entries(held, keys), {key: content.get(key, NOTHING) for key in keys}
        path = f"{path}.{keys[0]}" if isinstance(note.holder, Entries) else path
    yield Note(holder, path, content)


def _names(note: Note, known: set[str] | None) -> list[str]:
    """What has changed, but for what is `known` to."""
    if not isinstance(note.holder, Fields):
        return [] if known is None else [note.path]
    keys = changed_keys(note.content, note.holder.read())
    return [f"{note.path}.{key}" for key in keys if key not in (known or ())]
