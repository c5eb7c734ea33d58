"""Zero bubble's table of bubble rates, for the times that its authors profiled: theirs beside ours, all simulated.

    rate   (time - work) / time, where the time is the longest span of a device, from its own first start to its own
           last end: in the paper devices start the next step on their own

zb-1p and zb-2p are the authors' automatic schedules with the memory of 1f1b and with twice as much. Beside them stand
our `auto`, with the same limits and for the span, and zb-v, which has the memory of 1f1b.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from benchmarks.gpipe.published import RATES, PublishedRates
from benchmarks.runner.outcome import Figure, Grid
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Progress, silent
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate

_PAIRS = (
    ("1f1b", "f1b1"),
    ("zb-h1", "h1"),
    ("zb-h2", "h2"),
    ("auto, 1x", "zb_1p"),
    ("auto, 2x", "zb_2p"),
    ("zb-v", ""),
)


def run(
    *,
    lines: Annotated[int, "lines of the table, from the smallest; the last take a minute"] = len(RATES),
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row for each line of the paper's table."""
    rows = []
    for number, published in enumerate(RATES[:lines]):
        progress(f"line {number + 1} of {min(lines, len(RATES))}: {published.model}, M = {published.microbatches}")
        ours = {name: _rate(published, name) for name, _ in _PAIRS}
        theirs = {name: getattr(published, key) for name, key in _PAIRS if key}
        rows.append(
            {
                "model": published.model,
                "devices": published.devices,
                "microbatches": published.microbatches,
                "rates": ours,
                "published": theirs,
            }
        )
    progress("")
    return {"rows": rows}


def _rate(line: PublishedRates, name: str) -> float:
    costs = Costs(
        forward=line.forward, input_grad=line.input_grad, weight_grad=line.weight_grad, latency=line.hop,
        activation=1.0, kept_for_weight_grad=line.kept_for_weight_grad,
    )  # fmt: skip
    sizes: dict[str, Any] = {"devices": line.devices, "microbatches": line.microbatches, "costs": costs}
    recipe, _, times = name.partition(", ")
    if times:
        sizes |= {"memory_limit": times, "objective": "span"}
    found = simulate(make_schedule(recipe, **sizes), costs)
    return max(0.0, float(found.span_bubble))  # the last digits of sums differ


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """How far ours are from the published ones."""
    shown = []
    for name, key in _PAIRS:
        if key:
            off = [row["rates"][name] - row["published"][name] for row in found["rows"]]
            shown.append(
                Figure(f"{name}: greatest difference from the published rate", max(off, key=abs), "difference")
            )
    return shown


def tables(found: Mapping[str, Any]) -> list[Grid]:
    """Ours, and theirs in brackets."""
    return [Grid("Bubble rates for published times: ours (published)", _HEADINGS, _cells(found))]


_HEADINGS = ("model", "K", "M", *(name for name, _ in _PAIRS))


def _cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for row in found["rows"]:
        rates = [
            f"{row['rates'][name]:.4f} ({row['published'][name]:.4f})" if key else f"{row['rates'][name]:.4f}"
            for name, key in _PAIRS
        ]
        rows.append((row["model"], str(row["devices"]), str(row["microbatches"]), *rates))
    return rows


def report(found: dict[str, Any]) -> str:
    """A line for each of theirs."""
    return tabular(
        "bubble rates for published times: ours, and the published ones in brackets", _HEADINGS, _cells(found)
    )
