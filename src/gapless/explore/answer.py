"""The timeline for a question, and how to get the same without the page: a command, and a line of Python."""

import shlex
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from gapless.explore.question import MINIBATCHES, Question
from gapless.schedule import recipes
from gapless.schedule.costs import Number
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view import columns, page
from gapless.view.figures import Units

_COSTS = ("forward", "input_grad", "weight_grad", "recompute", "latency")


@lru_cache(maxsize=128)
def answer(question: Question) -> dict[str, Any]:
    """All that the page draws and says of one schedule."""
    timeline = timeline_of(question)
    described, packed = columns.pack(timeline)
    return {
        **page.describe(timeline, Units(), [timeline]),
        "columns": described,
        "packed": packed,
        "command": command_of(question),
        "python": python_of(question),
    }


def timeline_of(question: Question) -> Timeline:
    """As the command line makes it."""
    costs, limit = question.costs, question.memory_limit
    request = Request(
        question.devices,
        question.microbatches,
        question.own_stages_per_device,
        costs,
        limit,
        minibatches=MINIBATCHES,
    )
    schedule = recipes.build(question.schedule, request)
    again = range(schedule.num_stages) if question.recompute else ()
    return simulate(lowered(schedule, costs, Passes(recompute=again, memory_limit=limit)), costs)


def command_of(question: Question) -> str:
    """`gapless show zb-v --devices 8 --microbatches 32`."""
    words = ["gapless", "show", question.schedule]
    for name, value in (*_arguments(question), *_changed_costs(question)):
        words += [f"--{name.replace('_', '-')}", str(value)]
    if question.recompute:
        words.append("--remat")
    return shlex.join(words)


def python_of(question: Question) -> str:
    """One line that leaves the timeline in `timeline`."""
    costs = ", ".join(f"{name}={value}" for name, value in _changed_costs(question))
    arguments = "".join(f", {name}={value}" for name, value in _arguments(question))
    made = f'gapless.make_schedule("{question.schedule}"{arguments}{", costs=costs" if costs else ""})'
    parts = ["import gapless"]
    if costs:
        parts.append(f"costs = gapless.Costs({costs})")
    if question.recompute:
        limit = "" if question.memory_limit is None else f", memory_limit={question.memory_limit}"
        parts.append("from gapless.schedule.lower import add_recompute")
        made = f"add_recompute({made}, costs{limit})"
    parts.append(f"timeline = gapless.simulate({made}{', costs' if costs else ''})")
    return "; ".join(parts)


def _arguments(question: Question) -> Iterator[tuple[str, Number]]:
    """Of a schedule, as both the command and Python call them."""
    yield "devices", question.devices
    yield "microbatches", question.microbatches
    if question.schedule == "2bw":
        yield "minibatches", MINIBATCHES
    if (stages := question.own_stages_per_device) is not None:
        yield "stages_per_device", stages
    if question.memory_limit is not None:
        yield "memory_limit", question.memory_limit


def _changed_costs(question: Question) -> Iterator[tuple[str, Number]]:
    for name in _COSTS:
        if (value := getattr(question, name)) != getattr(Question, name):
            yield name, value
