"""`gapless plan --model`: a Hugging Face model, planned from its config alone."""

import argparse
import math
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from gapless import units
from gapless.cli.output import asked
from gapless.cli.planning.device_options import memories
from gapless.errors import ConfigError, PlanError
from gapless.plan.explain import assumed
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Profile
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from gapless.view import text

_SPEED = "400TFLOP/s"
_COLUMNS = {"parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer"}


def add(parser: argparse.ArgumentParser) -> None:
    """What is said of the model."""
    asked.add_values(
        parser.add_argument_group("a Hugging Face model, from its config alone"),
        ("--model", str, None, "NAME", "a folder with a config.json, or a model on the Hub, in place of PROFILE"),
        ("--length", int, None, "N", "tokens in a sample (default: 4096, or the model's longest)"),
        ("--dtype", str, None, "TYPE", "of weights, gradients and AdamW's state (default: the config's)"),
        ("--flops", str, None, "X", f"what a device computes in a second (default {_SPEED})"),
    )


def check(arguments: argparse.Namespace) -> None:
    """One source, with the options that are for it."""
    if (arguments.source is None) == (arguments.model is None):
        raise ConfigError("gapless plan takes one of PROFILE and --model NAME: give a profile, a config or a model")
    for name in ("length", "dtype", "flops") if arguments.model is None else ():
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for --model: a profile or a config says that itself")
    if arguments.model is not None and arguments.write:
        raise ConfigError(
            "--write is for a plan to train with, and one from a config alone is not: give the model and a batch to "
            "gapless.make_plan, with flops= if nothing is to be run"
        )


def read_model(arguments: argparse.Namespace) -> Profile:
    """The profile of the model, with samples of the length that was asked for."""
    from gapless.hf.model_profile import model_profile  # torch is loaded here, and not before

    speed, dtype = _speed(arguments), arguments.dtype or "auto"
    return model_profile(arguments.model, flops=speed, length=arguments.length, dtype=dtype)


def _speed(arguments: argparse.Namespace) -> float:
    try:
        return units.read(arguments.flops or _SPEED, units.FLOPS)
    except ConfigError as error:
        raise ConfigError(f"--flops {error}") from None


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
    best = replace(found.best, caution=assumed(_speed(arguments), profile.links))
    told = f"{found.explanation}{fits and f' Also: {fits}.'}"
    return replace(found, plans=(best, *found.plans[1:]), explanation=told)


def _first_fit(profile: Profile, memory: int, wanted: SearchOptions, minibatch: int) -> str:
    """The least number of such devices, with the smallest microbatches, recomputed where that helps."""
    wanted = replace(wanted, schedules=("1f1b",), microbatches=minibatch, replicas=False, time_limit=5.0)
    least = math.ceil(sum(layer.kept() for layer in profile.layers) / memory)
    for count in range(max(1, least), len(profile.layers) + 1):
        try:
            search(profile, [Device(memory)] * count, wanted, minibatch)
            return f"as one pipeline under 1f1b it fits on {units.show_count(count, 'such device')} first"
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
