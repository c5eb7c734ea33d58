"""Who waits for whom, as numbers: what the page, the SVG and the trace draw as arrows.

The actions of a schedule are numbered device by device, in the order of the rows. The rule itself is
`gapless.schedule.dependencies`; here its answers are only turned into those numbers.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate

from gapless.schedule.action import Schedule
from gapless.schedule.dependencies import Milestones


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
