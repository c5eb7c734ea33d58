"""What the replica of a rank is doing, in words that its own errors and other ranks' can use."""

import contextlib
from collections.abc import Iterator

from gapless.run.ranks.watch.whereabouts import Whereabouts


class ReplicaWhereabouts(Whereabouts):
    """What a replica does, in words."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.call = ""
        self._doing, self._waits, self._times = "before its first run", False, 0

    @contextlib.contextmanager
    def at(self, doing: str, *, waits: bool) -> Iterator[None]:
        """`waits`: for other ranks, and nothing is computed here."""
        self.call, self._doing, self._waits = doing, doing, waits
        self._times += 1
        try:
            yield
        finally:
            self.call, self._waits = "", True
            self._doing = f"in its own loop, after {doing}"

    def words(self) -> str:
        return f"rank {self.rank} was {self._doing}"

    def last(self) -> str:
        return self._doing

    def progress(self) -> object:
        return (self._doing, self._times) if self._waits else None
