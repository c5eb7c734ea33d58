"""Schedules side by side: each simulated for the same devices, costs and memory, and ranked."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.errors import GaplessError, ScheduleError
from gapless.schedule.costs import Costs, Number
from gapless.schedule.memory import fits
from gapless.schedule.recipes import RECIPES, build, find_recipe
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective, Timeline, plain
from gapless.view import text


@dataclass(frozen=True)
class Ranking:
    """What `compare` returns: a table to print, and the timelines behind it.

    ranked     those that end with a flush, the best first
    unflushed  those that update weights on the way, which have no makespan to rank
    refused    why each other one is left out
    objective  what they are ranked by: "makespan" or "span"
    plain      1f1b, which the memory of `auto` is compared with
    """

    ranked: Sequence[Timeline]
    unflushed: Sequence[Timeline]
    refused: dict[str, str]
    objective: str = "makespan"
    plain: Timeline | None = None

    @property
    def best(self) -> Timeline:
        return self.ranked[0]

    def __iter__(self) -> Iterator[Timeline]:
        return iter((*self.ranked, *self.unflushed))

    def __len__(self) -> int:
        return len(self.ranked) + len(self.unflushed)

    def __getitem__(self, name: str) -> Timeline:
        for timeline in self:
            if timeline.name == name:
                return timeline
        raise KeyError(self.refused.get(name, f"{name!r} was not compared"))

    def rows(self) -> list[dict[str, Any]]:
        """Plain numbers, as a data frame or a CSV file takes them."""
        found = [{**t.summary(), "rank": i + 1, "best": i == 0} for i, t in enumerate(self.ranked)]
        return found + [{**t.summary(), "rank": None, "best": False} for t in self.unflushed]

    def __repr__(self) -> str:
        """The ranking, those without a flush, and what was left out."""
        headings = ("", "schedule", "makespan", "bubble", "span", "span bubble", "peak", "stages", "actions")
        rows = [("*" if i == 0 else "", *_figures(timeline)) for i, timeline in enumerate(self.ranked)]
        lines = [text.table(headings, rows, left=2), "", f"* shortest {self.objective}"]
        lines += filter(None, [self._price_of_auto()])
        if self.unflushed:
            lines += ["", "without a flush (updates with older weights), time per minibatch in steady state:"]
            lines += [
                f"  {t.name:<12}{text.number(t.period):>10}   peak {text.number(max(t.peak))}" for t in self.unflushed
            ]
        if self.refused:
            lines += ["", "left out:"]
            lines += [f"  {name:<12}{reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)

    def _price_of_auto(self) -> str:
        """What it takes of memory beside 1f1b, where that is more."""
        auto = next((timeline for timeline in self.ranked if timeline.name == "auto"), None)
        if auto is None or self.plain is None or max(auto.peak) <= max(self.plain.peak):
            return ""
        more, faster = (float(x) for x in (max(auto.peak) / max(self.plain.peak), auto.makespan / self.plain.makespan))
        return (
            f"auto needs {more:.2g} times the memory of 1f1b (peak {text.number(max(auto.peak))} instead of "
            f"{text.number(max(self.plain.peak))}) and {faster:.0%} of its makespan; a memory limit of "
            "1x keeps it to 1f1b's"
        )


def compare(
    schedules: Iterable[str] | None = None,
    *,
    devices: int,
    microbatches: int,
    stages_per_device: int | None = None,
    costs: Costs | None = None,
    memory_limit: Number | str | None = None,
    objective: Objective = "makespan",
) -> Ranking:
    """Simulates schedules for the same sizes and costs and ranks them. `print` shows the table.

    schedules          names; all but `optimal` unless given
    devices            how many
    microbatches       in a minibatch
    stages_per_device  the default is what each schedule needs
    costs              of the actions; without them each takes one unit of time
    memory_limit       leaves out what needs more: in units of the costs' `activation`, or "2x" for twice 1f1b's peak
    objective          "makespan", or "span" for the longest time of a single device

    >>> gapless.compare(["1f1b", "zb-h1"], devices=4, microbatches=8).best.name
    'zb-h1'
    """
    request = Request(devices, microbatches, stages_per_device, costs or Costs(), memory_limit, objective)

    def simulated(name: str) -> Timeline:
        return simulate(build(name, request), request.costs, name)

    names = None if schedules is None else list(schedules)
    for name in names or ():
        find_recipe(name)
    return compared(simulated, names, request.limit, objective)


def schedules() -> list[str]:
    """The names of all schedules, as `gapless schedules` lists them."""
    return list(RECIPES)


def compared(
    simulated: Callable[[str], Timeline], names: Iterable[str] | None, limit: Number | None, objective: str
) -> Ranking:
    """The timelines of these schedules that can be made and fit the limit, ranked."""
    # optimal takes minutes, not milliseconds: only by its name
    asked = [name for name in RECIPES if name != "optimal"] if names is None else list(dict.fromkeys(names))
    timelines: list[Timeline] = []
    refused: dict[str, str] = {}
    for name in asked:
        try:
            timeline = simulated(name)
        except GaplessError as error:
            refused[name] = str(error)
            continue
        peak = max(timeline.peak)
        if not fits(peak, limit):
            refused[name] = f"its peak of {text.number(peak)} is above the limit of {text.number(limit)}"
        else:
            timelines.append(timeline)
    ranked = [timeline for timeline in timelines if _is_synchronous(timeline)]
    unflushed = [timeline for timeline in timelines if not _is_synchronous(timeline)]
    if not ranked and (names is None or not unflushed):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:2])
        fact = "can be made" if limit is None else f"fits a memory limit of {text.number(limit)}"
        raise ScheduleError(f"no schedule {fact} ({reasons})")
    ranked.sort(key=lambda timeline: _value(timeline, objective))
    plain_pipeline = None
    if any(timeline.name == "auto" for timeline in ranked):
        plain_pipeline = next((each for each in ranked if each.name == "1f1b"), None) or simulated("1f1b")
    return Ranking(ranked, unflushed, refused, objective, plain_pipeline)


def _is_synchronous(timeline: Timeline) -> bool:
    recipe = RECIPES.get(timeline.name)
    return timeline.schedule.num_minibatches == 1 if recipe is None else recipe.synchronous


def _value(timeline: Timeline, objective: str) -> tuple[Number, Number, Number]:
    first, second = plain(timeline.makespan), plain(timeline.span)  # equal ones stay equal whatever floats add up to
    return (first, second, max(timeline.peak)) if objective == "makespan" else (second, first, max(timeline.peak))


def _figures(timeline: Timeline) -> tuple[str, ...]:
    return (
        timeline.name,
        text.number(timeline.makespan),
        text.percent(timeline.bubble),
        text.number(timeline.span),
        text.percent(timeline.span_bubble),
        text.number(max(timeline.peak)),
        str(timeline.schedule.num_stages),
        f"{timeline.schedule.num_actions:,}",
    )
