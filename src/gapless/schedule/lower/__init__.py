"""From the schedule that a recipe states to the one that is run: every pass a file, and one order for everybody.

Recipes keep I and W apart. Whether a pair runs as one B, where a recompute goes and what crosses between devices is
decided here, and where there is a choice the simulator makes it. In the order in which they are made:

    fusion          a B as its I and its W, where that gains; an I and its W as one B, where nobody waits in between
    recompute       activations thrown away and made again, as early as memory allows
    offload         activations that wait in the host's memory, where the link has the time
    inference       the forwards alone
    weight_updates  an update per stage
    consecutive_steps  steps that follow each other without waiting for the optimizer's check
    transfers       a send and a receive for what crosses between devices
"""

from collections.abc import Collection
from dataclasses import dataclass

from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.lower.consecutive_steps import add_verdicts, consecutive, join_steps
from gapless.schedule.lower.fusion import fuse, split
from gapless.schedule.lower.inference import forward_only
from gapless.schedule.lower.offload import add_offload
from gapless.schedule.lower.recompute import add_recompute
from gapless.schedule.lower.transfers import add_transfers
from gapless.schedule.lower.weight_updates import add_updates

__all__ = [
    "Passes",
    "add_offload",
    "add_recompute",
    "add_transfers",
    "add_updates",
    "add_verdicts",
    "consecutive",
    "forward_only",
    "fuse",
    "join_steps",
    "lowered",
    "split",
]


@dataclass(frozen=True)
class Passes:
    """Which passes are made. `recompute` are the stages that are, `early` and `memory_limit` say how far ahead; of the
    stages in `offload` as much leaves as `memory_limit` asks for, or all that can without a wait.
    """

    split: bool = False
    fuse: bool = False
    recompute: Collection[int] = ()
    early: bool = True
    offload: Collection[int] = ()
    memory_limit: Number | None = None
    forward_only: bool = False
    updates: bool = False
    transfers: bool = False


def lowered(schedule: Schedule, costs: Costs | None, passes: Passes) -> Schedule:
    """The schedule after these passes, for the pipeline, the planner and the command line alike."""
    if passes.split:
        schedule = split(schedule, costs)
    if passes.fuse:
        schedule = fuse(schedule, costs)
    if passes.recompute:
        schedule = add_recompute(
            schedule, costs, stages=passes.recompute, memory_limit=passes.memory_limit, early=passes.early
        )
    if passes.offload:
        schedule = add_offload(schedule, costs, stages=passes.offload, memory_limit=passes.memory_limit)
    if passes.forward_only:
        schedule = forward_only(schedule)
    if passes.updates:
        schedule = add_updates(schedule)
    return add_transfers(schedule) if passes.transfers else schedule
