"""The order in which replicas read the shared weights and applied their gradients to them: all that asynchronous
training leaves to chance, as a value that can be kept, printed and run again.

    0r 1r 1a 1r 0a 1a

Replica 0 reads the weights for minibatch 0, replica 1 for minibatch 1; replica 1 applies its gradient (staleness 0) and
reads for minibatch 2; replica 0 applies minibatch 0 (staleness 1), replica 1 minibatch 2 (staleness 1). The n-th read
is for minibatch n.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from gapless.errors import ConfigError

_NOTHING = object()


class Move(NamedTuple):
    """A replica reads ("r") the shared weights, or applies ("a") the gradient of what it has read for."""

    replica: int
    kind: Literal["r", "a"]

    def __str__(self) -> str:
        return f"{self.replica}{self.kind}"


class Apply(NamedTuple):
    """One update; `staleness` updates came between what its gradient was computed on and what it was applied to."""

    replica: int
    minibatch: int
    staleness: int


@dataclass(frozen=True)
class Order:
    """Reads and applies, one after the other. Minibatches that were read for and never applied are those that a stop
    has cut off.
    """

    moves: tuple[Move, ...] = ()

    def __post_init__(self) -> None:
        reading: set[int] = set()
        for place, (replica, kind) in enumerate(self.moves):
            if (replica in reading) == (kind == "r"):
                fact = "reads twice without applying" if kind == "r" else "applies what it has not read for"
                raise ConfigError(f"move {place} of the order is {replica}{kind}, but then replica {replica} {fact}")
            (reading.add if kind == "r" else reading.remove)(replica)

    def __str__(self) -> str:
        return " ".join(str(move) for move in self.moves)

    @classmethod
    def parse(cls, text: str) -> "Order":
        """What `str` gives."""
        words = text.split()
        for word in words:
            if not re.fullmatch("[0-9]+[ra]", word):
                raise ConfigError(
                    f"{word[:20]!r} is not a move of an order: write 0r (replica 0 reads) or 0a (it applies)"
                )
        return cls(tuple(Move(int(word[:-1]), "r" if word[-1] == "r" else "a") for word in words))

    def merged(self, loaders: Sequence[Iterable[Any]]) -> Iterator[Any]:
        """The minibatches of replicas with a loader each, as they were read: what `replay` takes."""
        if len(loaders) < self.num_replicas:
            raise ConfigError(
                f"the order has {self.num_replicas} replicas, but {len(loaders)} loaders came: give each its own"
            )
        return self._merged([iter(each) for each in loaders])

    def _merged(self, loaders: Sequence[Iterator[Any]]) -> Iterator[Any]:
        for replica, kind in self.moves:
            if kind == "r":
                batch = next(loaders[replica], _NOTHING)
                if batch is _NOTHING:
                    raise ConfigError(
                        f"replica {replica} has read more minibatches than its loader has: give it all of them"
                    )
                yield batch

    @property
    def num_replicas(self) -> int:
        """The highest replica in it, and one."""
        return 1 + max((move.replica for move in self.moves), default=-1)

    @cached_property
    def applies(self) -> tuple[Apply, ...]:
        """Every update, in the order in which they were made."""
        made: list[Apply] = []
        reads = 0
        reading: dict[int, tuple[int, int]] = {}  # by replica: its minibatch, and the updates that it has seen
        for replica, kind in self.moves:
            if kind == "r":
                reading[replica] = reads, len(made)
                reads += 1
            else:
                minibatch, seen = reading[replica]
                made.append(Apply(replica, minibatch, len(made) - seen))
        return tuple(made)

    @property
    def max_staleness(self) -> int:
        """Of any update; 0 if there is none."""
        return max((each.staleness for each in self.applies), default=0)

    @property
    def mean_staleness(self) -> float:
        """Over all updates; 0 if there is none."""
        return sum(each.staleness for each in self.applies) / len(self.applies) if self.applies else 0.0
