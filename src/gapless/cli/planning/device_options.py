"""What the options of `gapless plan` say of its devices: how many there are, their memory, speeds and kinds."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless import units
from gapless.errors import ConfigError
from gapless.plan.plan import Plan
from gapless.plan.profile.file import read_profile
from gapless.plan.profile.machine import Device
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


def kinds_of(arguments: argparse.Namespace, profile: Profile) -> Kinds | None:
    """Where there are several, each with a profile."""
    if arguments.device_profiles is None:
        return None
    if arguments.speeds is not None:
        raise ConfigError("--speeds and --device-profiles both say how fast the devices are: give one of them")
    kinds = read_kinds(arguments.device_profiles, profile)
    if arguments.devices not in (None, len(kinds.speeds)):
        raise ConfigError(
            f"--device-profiles lists {len(kinds.speeds)} devices, but --devices is {arguments.devices}: leave it out"
        )
    return kinds


def machine_of(arguments: argparse.Namespace, profile: Profile) -> list[Device]:
    """The devices with their memory and speed."""
    kinds = kinds_of(arguments, profile)
    count = len(kinds.speeds) if kinds else arguments.devices or 4
    memory = memories(arguments.memory, count) or [None] * count
    speeds = kinds.speeds if kinds else speeds_of(arguments.speeds, count) or [1.0] * count
    return [Device(*pair) for pair in zip(memory, speeds, strict=True)]


def memories(given: str | None, count: int) -> list[Any] | None:
    """In bytes, of each device."""
    return _listed("--memory", given, count, _memory)


def speeds_of(given: str | None, count: int) -> list[Any] | None:
    """Of each device; 1 is as profiled."""
    return _listed("--speeds", given, count, _speed)


def _listed(option: str, given: str | None, count: int, read: Callable[[str], Any]) -> list[Any] | None:
    if given is None:
        return None
    try:
        values = [read(word) for word in given.split(",")]
    except ConfigError as error:
        raise ConfigError(f"{option} {error}") from None
    if len(values) not in (1, count):
        raise ConfigError(f"{option} lists {units.show_count(len(values), 'device')}, but there are {count}")
    return values * count if len(values) == 1 else values


def _memory(word: str) -> int:
    size = units.read_bytes(word)
    if size < 2**20:
        raise ConfigError(f"is {word[:40]!r}, which is {size} bytes: is the unit right, as in 24GiB?")
    return size


def _speed(word: str) -> float:
    try:
        speed = float(word)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigError(f"is {word[:40]!r}, but a speed is a number above 0")
    return speed
