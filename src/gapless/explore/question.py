"""What the page asks, read from an address: nothing in it is trusted, and nothing keeps the server at work for long.

The answer is a timeline, and how to get the same without the page: a command, and a line of Python.
"""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule import recipes
from gapless.schedule.costs import Costs, Number
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.recipes import RECIPES, find_recipe
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, plain
from gapless.view import columns, page
from gapless.view.figures import Units

NAMES = tuple(name for name in RECIPES if name != "optimal")  # which takes minutes
MINIBATCHES = 4  # of 2bw
MOST_ACTIONS = 40_000
MOST_SEARCHED = 2_048  # devices times microbatches, for auto
_MOST_COST = 1_000.0
_LONGEST = 1_000  # characters of a question


@dataclass(frozen=True)
class Question:
    """One schedule, with its sizes and costs. `recompute` is 0 where activations are kept."""

    schedule: str = "zb-v"
    devices: int = 8
    microbatches: int = 32
    stages_per_device: int | None = None
    forward: Number = 1
    input_grad: Number = 1
    weight_grad: Number = 1
    recompute: Number = 0
    latency: Number = 0
    memory_limit: Number | None = None

    @property
    def costs(self) -> Costs:
        """In which every cost that is not here has its default."""
        return Costs(self.forward, self.input_grad, self.weight_grad, self.recompute, latency=self.latency)

    @property
    def own_stages_per_device(self) -> int | None:
        """As many as were asked for, where the recipe takes that many; None for its own."""
        allowed = RECIPES[self.schedule].stages_per_device
        return self.stages_per_device if allowed is None or self.stages_per_device in allowed else None


WHOLE = {"devices": (1, 64), "microbatches": (1, 512), "stages_per_device": (1, 8)}


def read_question(text: str) -> Question:
    """`schedule=zb-v&devices=8&...`; what is not named has its default. Bad ones are refused with a sentence."""
    if len(text) > _LONGEST:
        raise ConfigError(f"the question has {len(text)} characters, but at most {_LONGEST} are read")
    known = {field.name for field in fields(Question)}
    try:
        words = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=20))
    except ValueError:
        raise ConfigError("the question has more than 20 parts") from None
    if unknown := sorted(words.keys() - known):
        raise ConfigError(f"there is no slider {unknown[0][:40]!r}")
    return _checked(Question(**{name: _value(name, words) for name in words}))  # type: ignore[arg-type]


def _value(name: str, words: Mapping[str, str]) -> str | Number:
    text = words[name]
    if name == "schedule":
        if find_recipe(text).name not in NAMES:
            raise ScheduleError(f"{text} searches for minutes: run `gapless simulate {text}` instead")
        return text
    label = name.replace("_", " ")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    low, high = WHOLE.get(name, (0, _MOST_COST))
    if not low <= value <= high or (name in WHOLE and not value.is_integer()):
        kind = "whole number" if name in WHOLE else "number"
        raise ConfigError(f"{label} is {text[:40]!r}, but it must be a {kind} from {low:g} to {high:g}")
    if name == "memory_limit" and value == 0:
        raise ConfigError("memory limit is 0, but nothing fits into that: leave it out for none")
    return plain(value)


def _checked(question: Question) -> Question:
    devices, microbatches = question.devices, question.microbatches
    stages = question.own_stages_per_device or (1 if RECIPES[question.schedule].stages_per_device == (1,) else 2)
    actions = 3 * devices * microbatches * stages * (MINIBATCHES if question.schedule == "2bw" else 1)
    if actions > MOST_ACTIONS:
        raise ConfigError(
            f"{question.schedule} would have up to {actions:,} actions, and this page draws {MOST_ACTIONS:,}: "
            "use fewer devices or microbatches, or `gapless show --html`, which draws millions"
        )
    if question.schedule == "auto" and devices * microbatches > MOST_SEARCHED:
        raise ConfigError(
            f"on this page auto takes at most {MOST_SEARCHED:,} devices times microbatches, "
            f"not {devices * microbatches:,}: use fewer, or `gapless show auto`"
        )
    return question


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
        question.devices, question.microbatches, question.own_stages_per_device, costs, limit, minibatches=MINIBATCHES
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
