"""Devices of several kinds, each with a profile of its own: one measured here, another from a file.

The planner takes one profile and a speed per device. The speed of a kind is that of a whole forward and backward of the
model; single layers may be faster or slower than that there, and how far they are is told.
"""

from dataclasses import dataclass

from gapless.errors import ConfigError
from gapless.plan.profile.profile import Profile
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
