"""When the host waits for copies to its memory, on GPUs.

A host is ahead of its GPU. Asked for memory that a copy still reads, torch's allocator would give other memory, and
nothing would have been gained; so an action that comes after the end of a copy, as simulated, waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.lower.offload import ended_copies
from gapless.stage.stage import Stage

Call = Callable[[], object]


def after_copies(
    calls: Sequence[Call], schedule: Schedule, costs: Costs | None, device: int, stages: Mapping[int, Stage]
) -> list[Call]:
    """The calls of a device, each after the copies out that it counts on."""
    found = []
    for call, copies in zip(calls, ended_copies(schedule, costs, device), strict=True):
        waits = [partial(stages[stage].wait_until_gone, microbatch) for stage, _, microbatch in copies]
        found.append(partial(_one_by_one, [*waits, call]) if waits else call)
    return found


def _one_by_one(calls: Sequence[Call]) -> None:
    for call in calls:
        call()
