"""Devices of several kinds, each with a profile of its own: one measured here, another from a file.

The search takes one profile and a speed per device. The speed of a kind is that of a whole forward and backward of the
model; single layers may be faster or slower than that there, and how far they are is told. What a plan takes with each
layer's own time on the kind that it is on is simulated afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gapless.errors import ConfigError
from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.profile.profile import Profile
from gapless.schedule.costs import Number
from gapless.schedule.simulate import simulate
from gapless.units import show_count


@dataclass(frozen=True)
class KindSpeed:
    """How fast a kind of device is, as a multiple of the one that the plan's profile is of.

    speed             for the model as a whole
    slowest, fastest  of its layers, those that take a thousandth of the time or more
    """

    speed: float
    slowest: float
    fastest: float


_COUNTS = 1e-3


def kind_of(base: Profile, other: Profile) -> KindSpeed:
    """From two profiles of the same layers."""
    if len(base.layers) != len(other.layers):
        raise ConfigError(
            f"{other.name or 'the other profile'} has {show_count(len(other.layers), 'layer')} and "
            f"{base.name or 'the first'} has {len(base.layers)}: profiles of two kinds of devices must be of the same "
            "model, cut in the same way"
        )
    same = other.scaled(base.samples)
    total, there = (sum(layer.work for layer in profile.layers) for profile in (base, same))
    pairs = [(one.work, two.work) for one, two in zip(base.layers, same.layers, strict=True)]
    ratios = [one / two for one, two in pairs if one >= _COUNTS * total and two >= _COUNTS * there] or [total / there]
    return KindSpeed(total / there, min(ratios), max(ratios))


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
