"""How long a step takes, and where the time goes, in the parts of the GPipe paper.

|-- compute --|- recompute -|- load imbalance -|- bubble -|- communication -|- update -|
 all devices' work, shared    the busiest one    waiting    hops, gradients
 out evenly                   has more           in order   of replicas
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property

from gapless.plan.cut.stage_costs import Stages
from gapless.plan.profile.profile import Profile
from gapless.plan.search.machine import Mesh
from gapless.schedule.action import Kind
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one step; together they are the step.

    compute        forwards and backwards, had each device an equal share
    recompute      the same of recomputes
    imbalance      what the busiest device has on top of its share
    bubble         what even the busiest device waits when hops take no time
    communication  what hops add to that, and the sum of the gradients of replicas
    update         the optimizer step of the device that takes longest
    """

    compute: float
    recompute: float
    imbalance: float
    bubble: float
    communication: float
    update: float

    @cached_property
    def total(self) -> float:
        return float(sum(astuple(self)))


def breakdown(profile: Profile, stages: Stages, timeline: Timeline, mesh: Mesh) -> Breakdown:
    schedule, costs = timeline.schedule, stages.costs
    makespan = float(timeline.makespan)
    together = makespan
    if costs.latency or costs.bandwidth is not None:
        together = float(simulate(schedule, replace(costs, latency=0, bandwidth=None)).makespan)
    recompute = costs.durations(schedule.placement)[Kind.RECOMPUTE]
    again = sum(float(recompute[a.stage]) for row in schedule.rows for a in row if a.kind is Kind.RECOMPUTE)
    work, shared = float(timeline.work), sum(map(float, timeline.busy)) / schedule.num_devices
    update = costs.per_stage("update", schedule.placement)
    sums, updates = [], []
    for device in range(schedule.num_devices):
        own = stages.placement.stages[device]
        size = sum(layer.gradients for layer in stages.of_device(device))
        sums.append(mesh.sum_seconds(profile, device, size))
        updates.append(sum(float(update[stage]) for stage in own))
    return Breakdown(
        compute=shared - again / schedule.num_devices,
        recompute=again / schedule.num_devices,
        imbalance=work - shared,
        bubble=together - work,
        communication=makespan - together + max(sums),
        update=max(updates),
    )
