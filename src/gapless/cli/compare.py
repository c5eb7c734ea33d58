"""`gapless compare`: every schedule for these costs and this memory, ranked."""

import argparse

from gapless.cli import options, terminal
from gapless.errors import GaplessError, ScheduleError
from gapless.schedule.costs import Costs, Number
from gapless.schedule.recipes import RECIPES
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, plain
from gapless.view import text
from gapless.view.template import filled

EXAMPLE = "gapless compare --devices 8 --microbatches 32 --memory-limit 1x"
add = options.add_all


def run(arguments: argparse.Namespace) -> int:
    """Ranks by the objective; what can't be made or does not fit is told with the reason."""
    costs = Costs(**options.given(arguments, Costs))
    limit = options.limit_of(arguments, costs)
    timelines, refused = _simulate_all(arguments, costs, limit)
    ranked = [t for t in timelines if RECIPES[t.name].synchronous]
    if not ranked:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:2])
        fact = "can be made" if limit is None else f"fits a memory limit of {text.number(limit)}"
        raise ScheduleError(f"no schedule {fact} ({reasons})")
    ranked.sort(key=lambda t: _value(t, arguments.objective))
    unflushed = [t for t in timelines if not RECIPES[t.name].synchronous]
    left_out = ""
    if refused and arguments.html:
        left_out = filled("listing.html", title="Left out", rows=refused.items())
    options.write_pictures(arguments, [*ranked, *unflushed], limit, overview=True, back=left_out)
    if arguments.json:
        found = [{**t.summary(), "rank": i + 1, "best": i == 0} for i, t in enumerate(ranked)]
        found += [{**t.summary(), "rank": None, "best": False} for t in unflushed]
        terminal.print_json(
            {"objective": arguments.objective, "best": ranked[0].name, "schedules": found, "refused": refused}
        )
    else:
        terminal.say(report(ranked, unflushed, refused, arguments.objective))
    return 0


def _value(timeline: Timeline, objective: str) -> tuple[Number, Number, Number]:
    first, second = plain(timeline.makespan), plain(timeline.span)  # equal ones stay equal whatever floats add up to
    return (first, second, max(timeline.peak)) if objective == "makespan" else (second, first, max(timeline.peak))


def _simulate_all(
    arguments: argparse.Namespace, costs: Costs, limit: Number | None
) -> tuple[list[Timeline], dict[str, str]]:
    """A timeline of every recipe that can be made for these sizes and fits, and why each other one is not there."""
    timelines, refused = [], {}
    for name in RECIPES:
        if name == "optimal":
            continue  # minutes, not milliseconds: `gapless simulate optimal`
        try:
            made, its_costs = options.passed(options.build(name, arguments, costs), costs, arguments, limit)
            timeline = simulate(made, its_costs, name)
        except GaplessError as error:
            refused[name] = str(error)
            continue
        peak = max(timeline.peak)
        if limit is not None and peak > limit:
            refused[name] = f"its peak of {text.number(peak)} is above the limit of {text.number(limit)}"
        else:
            timelines.append(timeline)
    return timelines, refused


def report(ranked: list[Timeline], unflushed: list[Timeline], refused: dict[str, str], objective: str) -> str:
    """The ranking, those without a flush, and what was left out."""
    headings = ("", "schedule", "makespan", "bubble", "span", "span bubble", "peak", "stages", "actions")
    rows = [("*" if i == 0 else "", *_figures(timeline)) for i, timeline in enumerate(ranked)]
    lines = [text.table(headings, rows, left=2), "", f"* shortest {objective}"]
    if unflushed:
        lines += ["", "without a flush (updates with older weights), time per minibatch in steady state:"]
        lines += [f"  {t.name:<12}{text.number(t.period):>10}   peak {text.number(max(t.peak))}" for t in unflushed]
    if refused:
        lines += ["", "left out:"]
        lines += [f"  {name:<12}{reason}" for name, reason in refused.items()]
    return "\n".join(lines)


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
