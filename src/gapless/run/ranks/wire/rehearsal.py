"""What the messages of a step are, where every step of a program is like its first: then nobody need be told.

    first step     sender: into a slot of its own, and tells     receiver: is told, and notes it
    all others     sender: into the same slot                    receiver: waits for the slot on its stream

Then the host of the receiver does not wait for that of the sender. Where kernels are small, so that a step takes as
long as its hosts do, each host launches its actions at once, and only the GPUs wait for each other.

Nothing can hang that would not hang otherwise. A stream waits for what the other end has not queued yet, but will:
each device queues its own row, in order, and `verify` has shown that rows which wait so come to an end. A slot belongs
to one message of a step, so a sender waits only for what was received in the step before.
"""

import weakref
from typing import Generic, TypeVar

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
