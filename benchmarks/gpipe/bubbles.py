"""Zero bubble's table of bubble rates, for the times that its authors profiled: theirs beside ours, all simulated.

    rate   (time - work) / time, where the time is the longest span of a device, from its own first start to its own
           last end: in the paper devices start the next step on their own

zb-1p and zb-2p are the authors' automatic schedules with the memory of 1f1b and with twice as much. Beside them stand
our `auto`, with the same limits and for the span, and zb-v, which has the memory of 1f1b.

example: python -m benchmarks bubbles --lines 3
"""

from typing import Annotated, Any, NamedTuple

from benchmarks.runner.rounds import Progress, silent
from benchmarks.runner.told import Figure, Found, Told, tabulated
from gapless import Costs, make_schedule, simulate

_PUBLISHED = ("1f1b", "zb-h1", "zb-h2", "auto, 1x", "auto, 2x")
_NAMES = (*_PUBLISHED, "zb-v")


class PublishedRates(NamedTuple):
    """A line of the tables of Qi et al., 2024, "Zero Bubble Pipeline Parallelism": what was profiled, in milliseconds,
    and the rates for it, in the order of `_PUBLISHED`. Sequences have 1,024 tokens.
    """

    model: str
    devices: int
    microbatches: int
    times: tuple[float, float, float]  # of F, I and W
    hop: float
    rates: tuple[float, ...]

    @property
    def costs(self) -> Costs:
        """Of what a forward leaves behind, by the paper's formulas: 34 h + 5 a s bytes, and 32 h until W."""
        width, heads = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}[self.model]
        kept = 32 * width / (34 * width + 5 * heads * 1024)
        times = dict(zip(("forward", "input_grad", "weight_grad"), self.times, strict=True))
        return Costs(**times, latency=self.hop, activation=1.0, kept_for_weight_grad=kept)


RATES = (
    PublishedRates("1.5B", 8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    PublishedRates("1.5B", 8, 32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    PublishedRates("1.5B", 8, 64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    PublishedRates("6.2B", 8, 24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    PublishedRates("6.2B", 8, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)),
    PublishedRates("6.2B", 8, 64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)),
    PublishedRates("14.6B", 16, 48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    PublishedRates("14.6B", 16, 64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    PublishedRates("14.6B", 16, 128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
    PublishedRates("28.3B", 32, 96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
    PublishedRates("28.3B", 32, 128, (10.408, 10.204, 7.703), 0.408, (0.2168, 0.1106, 0.0490, 0.1106, 0.0029)),
    PublishedRates("28.3B", 32, 256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0594, 0.0257, 0.0594, 0.0018)),
)


def run(
    *,
    lines: Annotated[int, "lines of the table, from the smallest; the last take a minute"] = len(RATES),
    progress: Progress = silent,
) -> Found:
    """A row for each line of the paper's table."""
    rows = []
    for number, line in enumerate(RATES[:lines]):
        progress(f"line {number + 1} of {min(lines, len(RATES))}: {line.model}, M = {line.microbatches}")
        sizes = {"model": line.model, "devices": line.devices, "microbatches": line.microbatches}
        theirs = dict(zip(_PUBLISHED, line.rates, strict=True))
        rows.append({**sizes, "rates": {name: _rate(line, name) for name in _NAMES}, "published": theirs})
    return {"rows": rows}


def _rate(line: PublishedRates, name: str) -> float:
    sizes: dict[str, Any] = {"devices": line.devices, "microbatches": line.microbatches, "costs": line.costs}
    recipe, _, times = name.partition(", ")
    if times:
        sizes |= {"memory_limit": times, "objective": "span"}
    bubble = float(simulate(make_schedule(recipe, **sizes), line.costs).span_bubble)
    return max(0.0, bubble)  # the last digits of sums differ


def told(found: Found) -> Told:
    """Ours, theirs in brackets, and how far they are apart."""
    rows, figures = [], []
    for row in found["rows"]:
        theirs = {name: f" ({rate:.4f})" for name, rate in row["published"].items()}
        rows.append(row | {name: f"{rate:.4f}{theirs.get(name, '')}" for name, rate in row["rates"].items()})
    for name in _PUBLISHED:
        off = max((row["rates"][name] - row["published"][name] for row in found["rows"]), key=abs)
        figures.append(Figure(f"{name}: greatest difference from the published rate", off, "difference"))
    title = "Bubble rates for published times: ours (published)"
    columns = " | ".join(("model | K=devices | M=microbatches", *_NAMES))
    return Told(figures, [tabulated(title, rows, columns, in_docs=True)])
