"""Where every step of a program has the shapes of its first, nobody need be told what a message is.

    first step     sender: into a slot of its own, and tells     receiver: is told, and notes it
    all others     sender: into the same slot                    receiver: waits for the slot on its stream

Then the host of the receiver does not wait for that of the sender. Where kernels are small, so that a step takes as
long as its hosts do, each host launches its actions at once, and only the GPUs wait for each other.

Nothing can hang that would not hang otherwise. A stream waits for what the other end has not queued yet, but will:
each device queues its own row, in order, and `verify` has shown that rows which wait so come to an end. A slot belongs
to one message of a step, so a sender waits only for what was received in the step before.

Unless it is promised (`static_shapes=True`), that is found out: a step in which no host asks its GPU for a number has
shapes that follow from those of its batch. When two such batches come in a row, the second step is a first one.
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gapless.errors import GaplessError
from gapless.guards.between_ranks import STATIC_SHAPES
from gapless.stage.batch import microbatch as mb

Ask = Callable[[GaplessError | None, int], int]
_PROMISE = "static_shapes=True says that all steps have the shapes of the first one"


SPEAK, REHEARSE, PLAY = range(3)  # every message tells what it is; this step does, and is noted; none does


class StaticShapes:
    """Those of the batches, by program. `promised`: steps that do not have those of the first one are refused."""

    def __init__(self, *, promised: bool = True) -> None:
        self.promised = promised
        self.is_used = promised
        self._first: weakref.WeakKeyDictionary[object, list[str | None]] = weakref.WeakKeyDictionary()
        self._last: weakref.WeakKeyDictionary[object, list[str | None]] = weakref.WeakKeyDictionary()

    def agreed(self, program: object, inputs: Any, target: Any, ask: Ask, *, rehearsed: bool, follows: bool) -> int:
        """What the next step is, for all ranks: the least that any of them can. They are asked with the fault of its
        batch, if it has one: a rank need not have all of it, and may have another one than the ranks that use theirs,
        so others may find none. If they refuse, the step was not the first one. `follows`: shapes follow from those of
        the batch.
        """
        found = [_shapes(inputs), _shapes(target)]
        first, last = self._first.get(program), self._last.get(program)
        if self.promised:
            fault = None if first is None else _fault(found, first)
            answer = max(REHEARSE, ask(fault, PLAY if rehearsed else REHEARSE))
            self._first.setdefault(program, found)
            return answer
        mine = SPEAK
        if follows and found == last:
            mine = PLAY if rehearsed and found == first else REHEARSE
        answer = ask(None, mine)
        self._last[program] = found
        if answer == REHEARSE:
            self._first[program] = found
        self.is_used = answer == PLAY
        return answer


def _fault(found: list[str | None], first: list[str | None]) -> GaplessError | None:
    for word, now, before in zip(("inputs", "targets"), found, first, strict=True):
        if now is not None and before is not None and now != before:
            return STATIC_SHAPES.refusal(f"{_PROMISE}, and the {word} of this one are {now}, where they were {before}")
    return None


def another_shape(tree: Any) -> GaplessError:
    """What a stage has made is not what it made in the first step, though its inputs are alike."""
    return STATIC_SHAPES.refusal(
        f"all steps so far had the same shapes, but a stage has now made {_shapes(tree)}, which it did not at this "
        "place in the first step",
        "pass static_shapes=False (strides, constants and requires_grad must be the same, too)",
    )


def _shapes(tree: Any) -> str | None:
    if tree is None:
        return None
    tensors, _ = mb.flatten(tree)
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors) or "no tensor"


Entry = TypeVar("Entry")


class Rehearsal(Generic[Entry]):
    """One end of a channel: what it knows of each message of a step, by program; None: nothing, the message tells."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[object, list[Entry | None]] = weakref.WeakKeyDictionary()
        self._lasting: list[tuple[weakref.ref[object], list[Entry | None]]] = []
        self._entries: list[Entry | None] = []
        self.is_on = False  # the step is the first one of its program
        self._at = 0

    def begin(self, program: object) -> list[Entry]:
        """A step starts. Returns what programs knew that are no more."""
        self._at, entries = 0, self._known.get(program)
        self.is_on = entries is None
        self._entries = [] if entries is None else entries
        if entries is None:
            self._known[program] = self._entries
            self._lasting.append((weakref.ref(program), self._entries))
        gone = [entries for key, entries in self._lasting if key() is None]
        self._lasting = [(key, entries) for key, entries in self._lasting if key() is not None]
        return [each for entries in gone for each in entries if each is not None]

    def end(self) -> None:
        """The step is over. What comes before the next one, as in an evaluation, is like no message of it."""
        self.is_on, self._entries, self._at = False, [], 0

    def note(self, entry: Entry | None) -> None:
        """What the next message is."""
        if self.is_on:
            self._entries.append(entry)

    def next(self) -> Entry | None:
        """What the next message is, if that is known."""
        if self.is_on or self._at >= len(self._entries):
            return None
        self._at += 1
        return self._entries[self._at - 1]
