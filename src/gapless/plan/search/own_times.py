"""What a plan takes where its devices are of several kinds, with every layer's own time on the kind that it is on."""

from collections.abc import Sequence
from dataclasses import replace

from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.profile.profile import Profile
from gapless.schedule.simulate import simulate

_TIMES = ("forward", "input_grad", "weight_grad", "backward", "recompute")


def own_seconds(plan: Plan, profiles: Sequence[Profile]) -> float:
    """The step of a plan that was made with one speed per kind. `profiles` has that of each device, in their order; of
    replicas the first one counts. Sums of gradients and the optimizer step stay as planned.
    """
    placement = plan.schedule.placement
    homes = [plan.mesh.device(0, home) for home in placement.homes]
    kinds = {id(profiles[device]): profiles[device].scaled(plan.samples) for device in homes}
    even = [1.0] * plan.num_devices
    costs = {
        key: make_stages(profile, plan.partition, placement, plan.mesh, even).costs for key, profile in kinds.items()
    }
    own = {
        name: [costs[id(profiles[device])].per_stage(name, placement)[stage] for stage, device in enumerate(homes)]
        for name in _TIMES
    }
    changed = replace(plan.costs, **own)  # type: ignore[arg-type]
    return plan.step_seconds + float(simulate(plan.schedule, changed).makespan - plan.timeline.makespan)
