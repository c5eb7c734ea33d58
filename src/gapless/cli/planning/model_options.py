"""`gapless plan --model`: a Hugging Face model, planned from its config alone."""

import argparse
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
from gapless.plan.search.first_fit import first_fit
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import SearchOptions
from gapless.view import text

_SPEED = "400TFLOP/s"
_OWN = ("length", "dtype", "flops")
_COLUMNS = ("stage", "layers", "parameters", "gradients", "optimizer", "activations", "message")


def add(parser: argparse.ArgumentParser) -> None:
    """What is said of the model."""
    asked.add_values(
        parser.add_argument_group("a Hugging Face model, from its config alone"),
        ("--model", str, None, "NAME", "a folder with a config.json, or a model on the Hub, in place of PROFILE"),
        ("--length", int, None, "N", "tokens in a sample (default: 4096, or the model's longest)"),
        ("--dtype", str, None, "TYPE", "of weights, gradients and AdamW's state (default: the config's)"),
        ("--flops", str, None, "X", f"what a device computes in a second, as {_SPEED} (the default)"),
    )


def check(arguments: argparse.Namespace) -> None:
    """One source, with the options that are for it."""
    if (arguments.source is None) == (arguments.model is None):
        raise ConfigError("gapless plan takes one of PROFILE and --model NAME: give a profile, a config or a model")
    given = [name for name in _OWN if getattr(arguments, name) is not None]
    if given and arguments.model is None:
        raise ConfigError(f"--{given[0]} is for --model: a profile or a config says that itself")
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
    """The plans for these devices, which say what they assume; if there are none, how many devices it takes."""
    minibatch = arguments.minibatch or 4 * len(machine)
    wanted = replace(wanted, layer_remat=False)  # a piece of a graph is one layer to its stage
    fits = _fits_from(arguments, profile, wanted, minibatch)
    try:
        found = search(profile, machine, wanted, minibatch, progress)
    except PlanError as error:
        raise PlanError("; ".join(filter(None, (str(error), fits)))) from None
    best = replace(found.best, caution=assumed(_speed(arguments), profile.links))
    return replace(
        found, plans=(best, *found.plans[1:]), explanation=f"{found.explanation}{fits and f' Also: {fits}.'}"
    )


def _fits_from(arguments: argparse.Namespace, profile: Profile, wanted: SearchOptions, minibatch: int) -> str:
    memory = memories(arguments.memory, arguments.devices or 4)
    if memory is None or len(set(memory)) > 1:
        return ""
    least = first_fit(profile, memory[0], wanted, minibatch)
    if least is None:
        return "as one pipeline under 1f1b it fits on no number of such devices"
    return f"as one pipeline under 1f1b it fits on {units.show_count(least, 'such device')} first"


def stages_of(profile: Profile, plan: Plan) -> list[dict[str, Any]]:
    """What each stage has: bytes, and its layers by their names; activations are of one microbatch."""
    layers = profile.scaled(plan.samples).layers
    found = []
    for start, end in pairwise([0, *accumulate(plan.partition)]):
        own = layers[start:end]
        names = [layer.name.partition(".")[2] for layer in own]
        found.append(
            {
                "layers": " to ".join(dict.fromkeys((names[0], names[-1]))),
                "parameters": sum(layer.parameters for layer in own),
                "gradients": sum(layer.gradients for layer in own),
                "optimizer": sum(layer.optimizer_state for layer in own),
                "activations": own[0].activation + sum(layer.held for layer in own[1:]),
                "message": own[-1].boundary if end < len(layers) else 0,
            }
        )
    return found


def stage_table(profile: Profile, plan: Plan) -> str:
    """The same as text."""
    rows = [
        (str(number), *(each if isinstance(each, str) else units.show_bytes(each) for each in stage.values()))
        for number, stage in enumerate(stages_of(profile, plan))
    ]
    return text.table(_COLUMNS, rows, left=(1,)) + "\nactivations and messages are of one microbatch"
