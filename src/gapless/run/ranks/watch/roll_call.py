"""All ranks make the same calls, in one order. Two things would make others wait for ever, and are told instead:

another call    a call that lasts longer than a moment is said to both neighbours, who compare it with their own
a refusal       a rank that raises before it began with a call says so; those that have begun with it raise too,
                and where all refuse alike, nothing has happened
"""

import contextlib
from collections.abc import Callable, Iterator

from gapless.errors import ConfigError
from gapless.guards.between_ranks import SAME_CALLS
from gapless.run.ranks.watch.ring import Neighbour, Ring, Words

_KEPT = 64  # calls


class RollCall:
    """The calls of this rank. `tell` is told what went wrong: how, on which rank, and in words."""

    def __init__(self, me: int, ring: Ring, tell: Callable[[str, int | None, str], None]) -> None:
        self._me, self._ring, self._tell = me, ring, tell
        self.number = 0  # of calls so far
        self.begun = False  # in this one, something that others wait for, or that waits for others
        self._doing: dict[int, str] = {}  # in the last calls
        self._theirs: dict[int, tuple[int, str]] = {}  # by rank: a call that lasts, and what it is
        self._refused: dict[int, Words] = {}  # calls that some rank could not begin with
        self._by_all = False  # this one was refused, on all ranks
        self._meetings = 0  # in this one
        self._meets = False
        self._seen = self._said = 0  # in the last look, and to the neighbours

    def note(self, doing: str) -> None:
        """One more call."""
        self.begun = self._by_all = False
        self._meetings = 0
        self.number += 1
        self._doing[self.number] = doing
        self._doing.pop(self.number - _KEPT, None)
        self._refused.pop(self.number - _KEPT, None)
        for rank in list(self._theirs):
            self._compare(rank)

    def begin(self) -> None:
        """From here on this rank waits for others, and they for it."""
        self.begun = True
        self._check_refused()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """In which all ranks refuse what one of them does: that need not be told."""
        self._meets = True
        self._meetings += 1
        self.begin()
        try:
            yield
        except ConfigError:
            self._by_all = True
            raise
        finally:
            self.begun = self._meets = False

    def refuse(self, text: str) -> None:
        """This rank raises, and has not begun."""
        if not self._by_all:
            words = {"refused": self.number, "by": self._me, "met": self._meetings, "text": text}
            self._note_refused(words)

    def look(self) -> None:
        """Now and then. What lasts from one look to the next may wait for ranks that do something else."""
        number, lasts = self.number, self.number == self._seen
        self._seen = number
        if lasts and number != self._said:
            self._said = number
            self._ring.say({"call": number, "doing": self._doing[number]})

    def hear(self, neighbour: Neighbour, words: Words) -> None:
        if "call" in words:
            self._theirs[neighbour.rank] = words["call"], words["doing"]
            self._compare(neighbour.rank)
        elif words["refused"] not in self._refused:
            self._note_refused(words)
            self._check_refused()

    def _compare(self, rank: int) -> None:
        number, theirs = self._theirs[rank]
        mine = self._doing.get(number, theirs)
        if mine != theirs:
            both = ", and ".join(f"rank {who} is {doing}" for who, doing in sorted(((self._me, mine), (rank, theirs))))
            fact = f"the ranks make different calls: in their call {number}, {both}"
            self._tell("other", None, SAME_CALLS.message(fact))

    def _note_refused(self, words: Words) -> None:
        self._refused[words["refused"]] = words
        self._ring.say(words)

    def _check_refused(self) -> None:
        """Whoever is in a meeting that the other one was in, too, will end it, and may refuse as well."""
        words = self._refused.get(self.number)
        if words is not None and self.begun and not (self._meets and self._meetings <= words["met"]):
            self._tell("raised", words["by"], words["text"])
