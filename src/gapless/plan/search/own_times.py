"""What a plan takes where its devices are of several kinds, with every layer's own time on the kind that it is on."""

from collections.abc import Sequence
from dataclasses import replace

from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.profile.profile import Profile
from gapless.schedule.costs import Number
from gapless.schedule.simulate import simulate

_TIMES = ("forward", "input_grad", "weight_grad", "backward", "recompute")


def own_seconds(plan: Plan, base: Profile, profiles: Sequence[Profile], speeds: Sequence[float]) -> float:
    """The step of a plan that was made from the profile `base` with a speed for each device. `profiles` has that of
    each device, in their order; of replicas the first one counts. A stage then takes so many times as long as was
    planned as its layers do on their device. Sums of gradients and the optimizer step stay as planned.
    """
    placement = plan.schedule.placement
    homes = [plan.mesh.device(0, home) for home in placement.homes]

    def times(profile: Profile, name: str) -> tuple[Number, ...]:
        even = [1.0] * plan.num_devices
        stages = make_stages(profile.scaled(plan.samples), plan.partition, placement, plan.mesh, even)
        return stages.costs.per_stage(name, placement)

    changed = {}
    for name in _TIMES:
        own = {id(profiles[device]): times(profiles[device], name) for device in homes}
        usual = times(base, name)
        changed[name] = [
            planned * (own[id(profiles[device])][stage] * speeds[device] / usual[stage] if usual[stage] else 1.0)
            for stage, (device, planned) in enumerate(zip(homes, plan.costs.per_stage(name, placement), strict=True))
        ]
    costs = replace(plan.costs, **changed)  # type: ignore[arg-type]
    return plan.step_seconds + float(simulate(plan.schedule, costs).makespan - plan.timeline.makespan)
