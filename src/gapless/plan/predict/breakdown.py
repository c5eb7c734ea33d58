"""How long a step takes, and where the time goes, in the parts of the GPipe paper.

|-- compute --|- recompute -|- load imbalance -|- bubble -|- communication -|- update -|
 all devices' work, shared    the busiest one    waiting    hops, gradients
 out evenly                   has more           in order   of replicas
"""

from dataclasses import astuple, dataclass, replace
from functools import cached_property

from gapless.plan.cut.stage_costs import Stages
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
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
    """Of the step that `timeline` simulates, on each replica of the mesh."""
    schedule, costs = timeline.schedule, stages.costs
    makespan = float(timeline.makespan)
    together = makespan
    if costs.latency or costs.bandwidth is not None:
        together = float(simulate(schedule, replace(costs, latency=0, bandwidth=None)).makespan)
    recompute = costs.durations(schedule.placement)[Kind.RECOMPUTE]
    again = sum(float(recompute[a.stage]) for a in schedule.actions if a.kind is Kind.RECOMPUTE)
    forward = costs.durations(schedule.placement)[Kind.FORWARD]
    for stage, mode in enumerate(stages.remat):
        if mode == "layer":  # inside the backward, and as long beside the forward as in the profile
            usual = sum(layer.forward.median for layer in stages.layers[stage]) or 1.0
            share = sum(layer.recompute.median for layer in stages.layers[stage]) / usual
            again += schedule.num_microbatches * share * float(forward[stage])
    work, shared = float(timeline.work), sum(map(float, timeline.busy)) / schedule.num_devices
    summed = _sums_end(profile, stages, timeline, mesh) - makespan
    return Breakdown(
        compute=shared - again / schedule.num_devices,
        recompute=again / schedule.num_devices,
        imbalance=work - shared,
        bubble=together - work,
        communication=makespan - together + max(0.0, summed),
        update=_update(stages),
    )


def step_seconds(profile: Profile, stages: Stages, timeline: Timeline, mesh: Mesh) -> float:
    """All of it together."""
    return max(float(timeline.makespan), _sums_end(profile, stages, timeline, mesh)) + _update(stages)


def _update(stages: Stages) -> float:
    """Of the device that takes longest."""
    times = stages.costs.per_stage("update", stages.placement)
    return max(sum(float(times[stage]) for stage in own) for own in stages.placement.stages)


def _sums_end(profile: Profile, stages: Stages, timeline: Timeline, mesh: Mesh) -> float:
    """When the last gradients are added up: those of a stage once its last one is there, while other stages still work,
    and on a device one stage after another.
    """
    if mesh.replicas == 1:
        return 0.0
    latest = 0.0
    for device, own in enumerate(stages.placement.stages):
        last: dict[int, float] = {}
        row, ends = timeline.schedule.rows[device], timeline.ends[device]
        for action, stop in zip(reversed(row), reversed(ends), strict=True):
            last.setdefault(action.stage, float(stop))
            if len(last) == len(own):
                break
        done = 0.0
        for stage, end in sorted(last.items(), key=lambda item: item[1]):
            size = sum(layer.gradients for layer in stages.layers[stage])
            done = max(done, end) + mesh.sum_seconds(profile, device, size)
        latest = max(latest, done)
    return latest
