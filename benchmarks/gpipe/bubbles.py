"""Zero bubble's table of bubble rates, for the times that its authors profiled: theirs beside ours, all simulated.

    rate   (time - work) / time, where the time is the longest span of a device, from its own first start to its own
           last end: in the paper devices start the next step on their own

zb-1p and zb-2p are the authors' automatic schedules with the memory of 1f1b and with twice as much. Beside them stand
our `auto`, with the same limits and for the span, and zb-v, which has the memory of 1f1b.

example: python -m benchmarks bubbles --lines 3
"""

from typing import Annotated, Any

from benchmarks.gpipe import PUBLISHED
from benchmarks.runner.findings import BenchmarkResult, Figure, tabulated
from benchmarks.runner.rounds import Progress, silent
from gapless import Costs, make_schedule, simulate

_PUBLISHED = ("1f1b", "zb-h1", "zb-h2", "auto, 1x", "auto, 2x")
_NAMES = (*_PUBLISHED, "zb-v")


RATES: list[dict[str, Any]] = PUBLISHED["bubbles"]


def published_costs(line: dict[str, Any]) -> Costs:
    """Of what a forward leaves behind, by the paper's formulas: 34 h + 5 a s bytes, and 32 h until W."""
    width, heads = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}[line["model"]]
    kept = 32 * width / (34 * width + 5 * heads * 1024)
    forward, input_grad, weight_grad = line["times"]
    return Costs(forward, input_grad, weight_grad, latency=line["hop"], activation=1.0, kept_for_weight_grad=kept)


def run(
    *,
    lines: Annotated[int, "lines of the table, from the smallest; the last take a minute"] = len(RATES),
    progress: Progress = silent,
) -> BenchmarkResult:
    """A row for each line of the paper's table: ours, theirs in brackets, and how far they are apart."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(RATES[:lines]):
        progress(f"line {number + 1} of {min(lines, len(RATES))}: {line['model']}, M = {line['microbatches']}")
        sizes = {key: line[key] for key in ("model", "devices", "microbatches")}
        theirs = dict(zip(_PUBLISHED, line["rates"], strict=True))
        ours = {name: _rate(line, name) for name in _NAMES}
        shown = {
            name: f"{rate:.4f}" + (f" ({theirs[name]:.4f})" if name in theirs else "") for name, rate in ours.items()
        }
        rows.append({**sizes, "rates": ours, "published": theirs, **shown})
    figures = []
    for name in _PUBLISHED:
        off = max((row["rates"][name] - row["published"][name] for row in rows), key=abs)
        figures.append(Figure(f"{name}: greatest difference from the published rate", off, "difference"))
    columns = " | ".join(("model | K=devices | M=microbatches", *_NAMES))
    table = tabulated("Bubble rates for published times: ours (published)", rows, columns, in_docs=True)
    return BenchmarkResult({"rows": rows}, figures, [table])


def _rate(line: dict[str, Any], name: str) -> float:
    costs = published_costs(line)
    sizes: dict[str, Any] = {"devices": line["devices"], "microbatches": line["microbatches"], "costs": costs}
    recipe, _, times = name.partition(", ")
    if times:
        sizes |= {"memory_limit": times, "objective": "span"}
    bubble = float(simulate(make_schedule(recipe, **sizes), costs).span_bubble)
    return max(0.0, bubble)  # the last digits of sums differ
