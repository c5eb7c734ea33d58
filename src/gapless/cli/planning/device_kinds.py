"""`gapless plan --device-profiles`: devices of several kinds, each with a profile of its own."""

from dataclasses import dataclass

from gapless import units
from gapless.errors import ConfigError
from gapless.plan.plan import Plan
from gapless.plan.profile.file import read_profile
from gapless.plan.profile.profile import Profile
from gapless.plan.search.heterogeneous import KindSpeed, kind_of, own_seconds


@dataclass(frozen=True)
class Kinds:
    """The profile of each device and its speed, and what is told of the kinds that are not as profiled."""

    base: Profile
    profiles: tuple[Profile, ...]
    speeds: tuple[float, ...]
    lines: tuple[str, ...]

    def step_seconds(self, plan: Plan) -> float:
        """With every layer's own time on its kind of device."""
        return own_seconds(plan, self.base, self.profiles, self.speeds)

    def report(self, plan: Plan) -> str:
        """How fast each kind is, and what the plan takes with every layer's own time there."""
        own = self.step_seconds(plan)
        told = (
            f"with each layer's own time on its kind of device a step takes {units.show_seconds(own)}; with one speed "
            f"for each kind it was planned to take {units.show_seconds(plan.step_seconds)}"
        )
        return "\n".join((*self.lines, told))


def read_kinds(text: str, base: Profile) -> Kinds:
    """As in `2,other.json:2`: two devices as profiled, then two of the kind that other.json is of."""
    profiles: list[Profile] = []
    speeds: list[float] = []
    lines = []
    for word in text.split(","):
        file, _, number = word.strip().rpartition(":")
        if not number.isdecimal() or not 1 <= int(number) <= 4096:
            raise ConfigError(
                f"--device-profiles has {word[:60]!r}, but it takes how many devices are as profiled, and FILE:N for N "
                "of another kind, as in 2,other.json:2"
            )
        profile = read_profile(file) if file else base
        kind = kind_of(base, profile) if file else KindSpeed(1.0, 1.0, 1.0)
        profiles += [profile] * int(number)
        speeds += [kind.speed] * int(number)
        if file:
            span = f"its layers {kind.slowest:.3g} to {kind.fastest:.3g}"
            lines.append(f"{number} devices of {file}: {kind.speed:.3g} times as fast, {span}")
    return Kinds(base, tuple(profiles), tuple(speeds), tuple(lines))
