"""What the options of `gapless plan` say of a Hugging Face model, which is planned from its config alone, and of its
devices: how many there are, their memory, speeds and kinds.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from gapless import units
from gapless.cli.output import asked
from gapless.errors import ConfigError, PlanError
from gapless.plan.explain import assumed
from gapless.plan.plan import Plan
from gapless.plan.profile.file import read_profile
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Profile
from gapless.plan.search.heterogeneous import KindSpeed, kind_of, own_seconds
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from gapless.view import text

_SPEED = "400TFLOP/s"
_COLUMNS = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer"}


def add(parser: argparse.ArgumentParser) -> None:
    """What is said of the model."""
    asked.add_options(
        parser.add_argument_group("a Hugging Face model, from its config alone"),
        ("--model", str, None, "NAME", "a folder with a config.json, or a model on the Hub, in place of PROFILE"),
        ("--length", int, None, "N", "tokens in a sample (default: 4096, or the model's longest)"),
        ("--dtype", str, None, "TYPE", "of weights, gradients and AdamW's state (default: the config's)"),
        ("--flops", str, None, "X", f"speed of a device in FLOP/s (default {_SPEED})"),
    )


def check(arguments: argparse.Namespace) -> None:
    """One source, with the options that are for it."""
    if (arguments.source is None) == (arguments.model is None):
        raise ConfigError("gapless plan needs either PROFILE or --model NAME: give a profile, a config or a model")
    for name in ("length", "dtype", "flops") if arguments.model is None else ():
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for --model: a profile or a config says that itself")
    if arguments.model is not None and arguments.write:
        raise ConfigError(
            "--write is for plans to train with, and a config alone gives none: pass the model and a batch to "
            "gapless.make_plan, with flops= if nothing should run"
        )


def read_model(arguments: argparse.Namespace) -> Profile:
    """The profile of the model, with samples of the length that was asked for."""
    from gapless.hf.model_profile import model_profile  # torch is loaded here, and not before

    speed, dtype = _flops(arguments), arguments.dtype or "auto"
    return model_profile(arguments.model, flops=speed, length=arguments.length, dtype=dtype)


def _flops(arguments: argparse.Namespace) -> float:
    with asked.naming("--flops"):
        return units.read(arguments.flops or _SPEED, units.FLOPS)


def plan_model(
    arguments: argparse.Namespace, profile: Profile, machine: list[Device], wanted: SearchOptions, progress: Any
) -> Found:
    """The plans for these devices, which say what they assume, and how many devices it takes."""
    minibatch = arguments.minibatch or 4 * len(machine)
    wanted = replace(wanted, remat=("stage",))  # a piece of a graph is one layer to its stage
    memory = set(memories(arguments.memory, len(machine)) or ())
    fits = _first_fit(profile, memory.pop(), wanted, minibatch) if len(memory) == 1 else ""
    try:
        found = search(profile, machine, wanted, minibatch, progress)
    except PlanError as error:
        raise PlanError("; ".join(filter(None, (str(error), fits)))) from None
    best = replace(found.best, caution=assumed(_flops(arguments), profile.links))
    told = f"{found.explanation}{fits and f' Also: {fits}.'}"
    return replace(found, plans=(best, *found.plans[1:]), explanation=told)


def _first_fit(profile: Profile, memory: int, wanted: SearchOptions, minibatch: int) -> str:
    """The least number of such devices, with the smallest microbatches, recomputed where that helps."""
    wanted = replace(wanted, schedules=("1f1b",), microbatches=minibatch, replicas=False, time_limit=5.0)
    least = math.ceil(sum(layer.kept() for layer in profile.layers) / memory)
    for count in range(max(1, least), len(profile.layers) + 1):
        try:
            search(profile, [Device(memory)] * count, wanted, minibatch)
            return f"as one pipeline under 1f1b it first fits on {units.show_count(count, 'such device')}"
        except PlanError:
            continue
    return "as one pipeline under 1f1b it fits on no number of such devices"


def stages_of(profile: Profile, plan: Plan) -> list[dict[str, Any]]:
    """What each stage has: its layers by their names, and bytes; activations and messages are of one microbatch."""
    layers, found = profile.scaled(plan.samples).layers, []
    for start, end in pairwise([0, *accumulate(plan.partition)]):
        own = layers[start:end]
        names = [layer.name.partition(".")[2] for layer in own]
        stage: dict[str, Any] = {"layers": " to ".join(dict.fromkeys((names[0], names[-1])))}
        stage |= {word: sum(getattr(layer, name) for layer in own) for name, word in _COLUMNS.items()}
        stage["activations"] = own[0].activation + sum(layer.held for layer in own[1:])
        found.append(stage | {"message": own[-1].boundary if end < len(layers) else 0})
    return found


def stage_table(profile: Profile, plan: Plan) -> str:
    """The same as text."""
    stages = stages_of(profile, plan)
    rows = [
        (str(number), *(each if isinstance(each, str) else units.show_bytes(each) for each in stage.values()))
        for number, stage in enumerate(stages)
    ]
    return text.table(("stage", *stages[0]), rows, left=(1,)) + "\nactivations and messages are of one microbatch"


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
    with asked.naming(option):
        values = [read(word) for word in given.split(",")]
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
