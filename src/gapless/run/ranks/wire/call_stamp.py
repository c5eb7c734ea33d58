"""Which call of its rank a message was sent in: it is only ever taken by the same call of another.

    rank 0   step 5   -- activation: call 5, a step, 4 microbatches, weight 1, ... -->   rank 1   evaluation 5: refused

Ranks whose calls differ would take each other's messages, and train on numbers of another batch, without a word. So
every message has in its header what all ranks must have in common, and where ranks meet they compare the same. Where
two of them disagree, the error says in which argument.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gapless.errors import GaplessError
from gapless.guards.between_ranks import SAME_CALLS

_SHOWN = 80  # characters of a value
_MOST_SHOWN = 5


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two facts differ: the name of the place, and both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            place = f"{name} {key}".strip()
            if key in one and key in other:
                yield from differences(one[key], other[key], place)
            else:
                here, there = (_shown(facts[key]) if key in facts else "missing" for facts in (one, other))
                yield place, here, there
    elif one != other:
        yield name, _shown(one), _shown(other)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def disagreement(one: Mapping[str, Any], other: Mapping[str, Any], first: int, me: int) -> str:
    """Of what rank `first` has and what this one has; empty if it is the same."""
    found = list(differences(one, other))
    each = "; ".join(
        f"{name} is {one} on rank {first} and {other} on rank {me}" for name, one, other in found[:_MOST_SHOWN]
    )
    more = f"; and {len(found) - _MOST_SHOWN} more differences" if len(found) > _MOST_SHOWN else ""
    return SAME_CALLS.message(f"the ranks disagree: {each}{more}") if found else ""


KINDS = (
    "making its pipeline",
    "in a step",
    "evaluating",
    "clipping gradients",
    "gathering the state of its model",
    "loading a state",
    "sharing out an update",
    "making a stream",
    "streaming",
    "opening its checkpoints",
    "saving a checkpoint",
    "loading a checkpoint",
    "measuring its links",
    "planning",
)
_OTHER = 255
_NAMES = {"clipping gradients": ("max_norm", "norm_type")}  # of its numbers; those of a step are its weight alone
_SYNC, _TIMELINE, _TRAINS = 1, 2, 4
_FIELDS = struct.Struct("<IBBHIdd")
STAMP_SIZE = _FIELDS.size


class Call(NamedTuple):
    """A call of one rank, as numbers."""

    number: int = 0
    kind: int = 0
    flags: int = 0
    microbatches: int = 0
    modes: int = 0  # of all modules, in short
    first: float = 0.0
    second: float = 0.0

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "Call":
        """As it was sent in a tensor."""
        return cls(*map(int, numbers[:5]), *numbers[5:])

    @property
    def doing(self) -> str:
        return KINDS[self.kind] if self.kind < len(KINDS) else "in another call"

    def facts(self) -> dict[str, Any]:
        """Its arguments, in words."""
        first, second = _NAMES.get(self.doing, ("weight", "second number"))
        return {
            "sync": bool(self.flags & _SYNC),
            "timeline": bool(self.flags & _TIMELINE),
            "mode": "train" if self.flags & _TRAINS else "eval",
            "digest of the modes of all modules": f"{self.modes:08x}",
            "number of microbatches": self.microbatches,
            first: self.first,
            second: self.second,
        }


def row_length(microbatches: int) -> int:
    """Of what ranks compare: two numbers, their call, and either another one or a number for each microbatch."""
    fields = len(Call._fields)
    return 2 + fields + max(1 + fields, microbatches)


class Stamp:
    """The call that this rank is in."""

    def __init__(self) -> None:
        self.call = Call()
        self.now = _FIELDS.pack(*self.call)  # read for every message, by any thread

    def begin(self, number: int, doing: str, first: float = 0.0, second: float = 0.0) -> None:
        """Another call."""
        self._set(Call(number, KINDS.index(doing) if doing in KINDS else _OTHER, first=first, second=second))

    def detail(self, weight: float, microbatches: int, modes: int, *, sync: bool, timeline: bool, trains: bool) -> None:
        """What else is known of it before its first message."""
        flags = _SYNC * sync | _TIMELINE * timeline | _TRAINS * trains
        self._set(Call(*self.call[:2], flags, microbatches, modes, weight))

    def _set(self, call: Call) -> None:
        self.call = call._replace(number=call.number & 0xFFFFFFFF, microbatches=call.microbatches & 0xFFFF)
        self.now = _FIELDS.pack(*self.call)

    def refuse(self, stamp: bytes, me: int, other: int) -> GaplessError:
        """A message came that was sent in another call."""
        fault = different(self.call, Call(*_FIELDS.unpack(stamp)), me, other)
        return fault or SAME_CALLS.refusal(f"rank {me} and rank {other} make different calls")


def different(mine: Call, theirs: Call, me: int, other: int) -> GaplessError | None:
    """How two calls differ, if they do."""
    if mine[:2] != theirs[:2]:
        each = [
            f"rank {rank} is {call.doing} in its call {call.number}" for rank, call in ((me, mine), (other, theirs))
        ]
        return SAME_CALLS.refusal(f"the ranks make different calls: {', and '.join(each)}")
    return None if mine == theirs else SAME_CALLS.refusal(disagreement(theirs.facts(), mine.facts(), other, me), "")
