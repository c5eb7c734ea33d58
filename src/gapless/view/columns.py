"""A timeline as columns of numbers, small enough to put a million actions into a page.

Nothing is rounded. A column of whole numbers (or of halves, quarters, ...) becomes the differences of its neighbours as
32-bit integers, which compress to almost nothing; any other column stays as it is, in 64-bit floats.

    starts 0 1 2 3 5.5   ->   scale 2, differences 0 2 2 2 5   ->   zlib   ->   base64

Who waits for whom is a column too: what the page, the SVG and the trace draw as arrows. The actions of a schedule are
numbered device by device, in the order of the rows. The rule itself is `gapless.schedule.dependencies`; here its
answers are only turned into those numbers.
"""

import sys
import zlib
from array import array
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.asynchronous.weights import weight_versions
from gapless.schedule.costs import Number
from gapless.schedule.dependencies import Milestones
from gapless.schedule.timeline import Timeline
from gapless.view.legend import KINDS

_SCALES = (1, 2, 4, 8, 16, 32)
_LARGEST = 2**30  # so that a difference of two still fits into 32 bits


def pack(timeline: Timeline) -> tuple[list[dict[str, Any]], str]:
    """How to read the columns, and their compressed bytes in base64."""
    described, parts = [], []
    for name, (description, data) in _columns(timeline):
        described.append({"name": name, **description})
        parts.append(data + bytes(-len(data) % 8))  # typed arrays begin at multiples of their item's size
    return described, b64encode(zlib.compress(b"".join(parts), 6)).decode("ascii")


def _columns(timeline: Timeline) -> Iterable[tuple[str, tuple[dict[str, Any], bytes]]]:
    schedule = timeline.schedule
    yield "start", _numbers(_floats(timeline.starts, timeline.start))
    yield "end", _numbers(_floats(timeline.ends, timeline.start))
    memory = list(chain.from_iterable(timeline.memory))
    yield "held", _numbers([float(held) for held, _ in memory])
    yield "after", _numbers([float(after) for _, after in memory])
    del memory
    place = {kind: number for number, kind in enumerate(KINDS)}
    yield "kind", _integers([place[action.kind] for action in schedule.actions])
    yield "stage", _integers([action.stage for action in schedule.actions])
    yield "microbatch", _integers([action.microbatch for action in schedule.actions])
    if schedule.num_minibatches > 1:
        seen = weight_versions(schedule).seen
        yield "version", _integers([_version(action, seen) for action in schedule.actions])
    needs = resolve(schedule)
    counts = [after - before for before, after in pairwise(needs.first)]
    yield "needCount", _integers(counts)
    # How far back a need lies hardly changes from one action to the next, where its number always does.
    needing = chain.from_iterable([number] * count for number, count in enumerate(counts))
    yield "needBack", _integers([number - need for number, need in zip(needing, needs.needs, strict=True)])


def _version(action: Action, seen: Mapping[tuple[int, int], int]) -> int:
    """Of the weights that it uses; an update says which one it makes, as the negative of its number."""
    stage, kind, number = action
    return -1 - number if kind is Kind.UPDATE else seen.get((stage, number), 0)


def _floats(rows: Sequence[Sequence[Number]], first: Number) -> list[float]:
    return [float(value - first) for row in rows for value in row]


def _numbers(values: list[float]) -> tuple[dict[str, Any], bytes]:
    for scale in _SCALES:
        if all((value * scale).is_integer() and abs(value) * scale < _LARGEST for value in values):
            return _integers([int(value * scale) for value in values], scale)
    return {"type": "float64", "length": len(values)}, _bytes(array("d", values))


def _integers(values: list[int], scale: int = 1) -> tuple[dict[str, Any], bytes]:
    differences = array("i", values[:1])
    differences.extend([after - before for before, after in pairwise(values)])
    return {"type": "int32", "length": len(values), "scale": scale}, _bytes(differences)


def _bytes(values: "array[int] | array[float]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@dataclass(frozen=True)
class Needs:
    """Action n needs the actions `needs[first[n]:first[n + 1]]`."""

    first: "array[int]"
    needs: "array[int]"

    def of(self, number: int) -> "array[int]":
        return self.needs[self.first[number] : self.first[number + 1]]


def resolve(schedule: Schedule) -> Needs:
    """A need that no action of the schedule meets is left out: `verify` reports it, the viewer still draws the rest."""
    milestones = Milestones(schedule)
    where = array("i", [-1]) * milestones.size  # the number of the action that reaches each milestone
    for number, (stage, kind, microbatch) in enumerate(schedule.actions):
        for base in milestones.gives[kind][stage]:
            where[base + microbatch] = number
    first, needs = array("i", [0]), array("i")
    for action in schedule.actions:
        for base in milestones.needs_of(action):
            if (number := where[base + action.microbatch]) >= 0:
                needs.append(number)
        first.append(len(needs))
    return Needs(first, needs)


def row_offsets(schedule: Schedule) -> list[int]:
    """The number of each row's first action, and after them the number of all actions."""
    return list(accumulate(map(len, schedule.rows), initial=0))
