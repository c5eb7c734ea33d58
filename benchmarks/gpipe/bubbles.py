"""Zero bubble's table of bubble rates, for the times that its authors profiled: theirs beside ours, all simulated.

    rate   (time - work) / time, where the time is the longest span of a device, from its own first start to its own
           last end: in the paper devices start the next step on their own

zb-1p and zb-2p are the authors' automatic schedules with the memory of 1f1b and with twice as much. Beside them stand
our `auto`, with the same limits and for the span, and zb-v, which has the memory of 1f1b.

example: python -m benchmarks bubbles --lines 3
"""

from typing import Annotated, Any

from benchmarks.gpipe.published import RATES, PublishedRates
from benchmarks.runner.rounds import Progress, silent
from benchmarks.runner.told import Figure, Found, Told, tabulated
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate

_PAIRS = {"1f1b": "f1b1", "zb-h1": "h1", "zb-h2": "h2", "auto, 1x": "zb_1p", "auto, 2x": "zb_2p", "zb-v": ""}


def run(
    *,
    lines: Annotated[int, "lines of the table, from the smallest; the last take a minute"] = len(RATES),
    progress: Progress = silent,
) -> Found:
    """A row for each line of the paper's table."""
    rows = []
    for number, published in enumerate(RATES[:lines]):
        progress(f"line {number + 1} of {min(lines, len(RATES))}: {published.model}, M = {published.microbatches}")
        line = {key: getattr(published, key) for key in ("model", "devices", "microbatches")}
        theirs = {name: getattr(published, key) for name, key in _PAIRS.items() if key}
        rows.append({**line, "rates": {name: _rate(published, name) for name in _PAIRS}, "published": theirs})
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


def told(found: Found) -> Told:
    """Ours, theirs in brackets, and how far they are apart."""
    rows, figures = [], []
    for row in found["rows"]:
        theirs = {name: f" ({rate:.4f})" for name, rate in row["published"].items()}
        rows.append(row | {name: f"{rate:.4f}{theirs.get(name, '')}" for name, rate in row["rates"].items()})
    for name in (name for name, key in _PAIRS.items() if key):
        off = max((row["rates"][name] - row["published"][name] for row in found["rows"]), key=abs)
        figures.append(Figure(f"{name}: greatest difference from the published rate", off, "difference"))
    title = "Bubble rates for published times: ours (published)"
    columns = " | ".join(("model | K=devices | M=microbatches", *_PAIRS))
    return Told(figures, [tabulated(title, rows, columns, in_docs=True)])
