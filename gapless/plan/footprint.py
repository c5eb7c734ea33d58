"""What each device holds at its peak, in bytes: will it fit?

Activations are those of `schedule.memory`, the one copy of what an action allocates and frees. The rest is there from
the first step to the last, or comes from how messages travel.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from gapless.plan.profile import Profile
from gapless.plan.stages import Stages
from gapless.schedule import memory
from gapless.schedule.action import Schedule
from gapless.schedule.verify import receive_buffers

SPARE_BUFFERS = 1  # of a channel, on top of what the deadlock proof asks for: receives are posted ahead
SLACK = 0.05  # what an allocator loses between blocks that come and go, as a share of them


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at its peak.

    activations  what forwards leave behind for backwards, and the inputs kept for a recompute
    buffers      messages on their way: receives that are posted ahead, and one that is being sent per channel
    workspace    what the hungriest layer takes while it runs
    slack        lost by the allocator
    reserved     taken by others
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    buffers: int
    workspace: int
    slack: int
    reserved: int

    @cached_property
    def total(self) -> int:
        return int(sum(astuple(self)))


def footprints(
    profile: Profile, stages: Stages, schedule: Schedule, *, optimizer_shards: int = 1, slack: float = SLACK
) -> tuple[Footprint, ...]:
    """Of each device. `optimizer_shards`: among how many replicas the optimizer's state is shared out."""
    peaks = memory.peaks(schedule, stages.memory_costs)
    buffers = _buffers(schedule, stages)
    found = []
    for device in range(schedule.num_devices):
        layers = stages.of_device(device)
        activations, workspace = math.ceil(peaks[device]), max((layer.workspace for layer in layers), default=0)
        found.append(
            Footprint(
                parameters=sum(layer.parameters for layer in layers),
                gradients=sum(layer.gradients for layer in layers),
                optimizer_state=math.ceil(sum(layer.optimizer_state for layer in layers) / optimizer_shards),
                activations=activations,
                buffers=buffers[device],
                workspace=workspace,
                slack=math.ceil(slack * (activations + buffers[device] + workspace)),
                reserved=profile.reserved,
            )
        )
    return tuple(found)


def _buffers(schedule: Schedule, stages: Stages) -> dict[int, int]:
    """Per device the messages that may be on their way from it and to it."""
    homes = [schedule.placement.device(stage, 0) for stage in range(schedule.num_stages)]
    largest: dict[tuple[int, int, str], int] = defaultdict(int)
    for stage in range(1, len(homes)):
        before, here, size = homes[stage - 1], homes[stage], stages.boundary[stage]
        for channel in ((before, here, "activation"), (here, before, "gradient")):
            largest[channel] = max(largest[channel], size)
    held: dict[int, int] = defaultdict(int)
    for channel, count in receive_buffers(schedule).items():
        source, target, _ = channel
        held[target] += (count + SPARE_BUFFERS) * largest[channel]
        held[source] += largest[channel]
    return held


def in_flight_at_peak(schedule: Schedule, stages: Stages) -> tuple[float, ...]:
    """Per stage, when its device holds most: how many times its activations of one microbatch are there."""
    costs = stages.memory_costs
    activation = costs.per_stage("activation", stages.placement)
    found = [0.0] * schedule.num_stages
    for row, changes in zip(schedule.rows, memory.changes(schedule, costs), strict=True):
        held: dict[int, float] = defaultdict(float)
        total = most = 0.0
        for action, (takes, gives) in zip(row, changes, strict=True):
            held[action.stage] += float(takes)
            total += float(takes)
            if total > most:
                most = total
                for stage, size in held.items():
                    found[stage] = size / float(activation[stage]) if activation[stage] else 0.0
            held[action.stage] -= float(gives)
            total -= float(gives)
    return tuple(found)


def over_limit(held: Sequence[Footprint], limits: Sequence[int | None]) -> list[int]:
    """The devices that hold more than they have, the fullest first."""
    excess = {
        device: footprint.total - limit
        for device, (footprint, limit) in enumerate(zip(held, limits, strict=True))
        if limit is not None and footprint.total > limit
    }
    return sorted(excess, key=lambda device: (-excess[device], device))
