"""How long a step takes, and where the time goes, in the parts of the GPipe paper.

|-- compute --|- recompute -|- load imbalance -|- bubble -|- communication -|- update -|
 all devices' work, shared    the busiest one    waiting    hops, gradients
 out evenly                   has more           in order   of replicas
"""

from dataclasses import replace

from gapless.plan.cut.stage_costs import Stages
from gapless.plan.plan import Breakdown
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.schedule.action import Kind
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline


def breakdown(profile: Profile, stages: Stages, timeline: Timeline, mesh: Mesh) -> Breakdown:
    """Of the step that `timeline` simulates, on each replica of the mesh."""
    schedule, costs = timeline.schedule, stages.costs
    makespan = float(timeline.makespan)
    together = makespan
    if costs.latency or costs.bandwidth is not None:
        together = float(simulate(schedule, replace(costs, latency=0, bandwidth=None)).makespan)
    recompute = costs.durations(schedule.placement)[Kind.RECOMPUTE]
    again = sum(float(recompute[a.stage]) for a in schedule.actions if a.kind is Kind.RECOMPUTE)
    work, shared = float(timeline.work), sum(map(float, timeline.busy)) / schedule.num_devices
    update = costs.per_stage("update", schedule.placement)
    sizes = [sum(layer.gradients for layer in stages.of_device(device)) for device in range(schedule.num_devices)]
    summed = max(mesh.sum_seconds(profile, device, size) for device, size in enumerate(sizes))
    return Breakdown(
        compute=shared - again / schedule.num_devices,
        recompute=again / schedule.num_devices,
        imbalance=work - shared,
        bubble=together - work,
        communication=makespan - together + summed,
        update=max(sum(float(update[stage]) for stage in own) for own in stages.placement.stages),
    )
