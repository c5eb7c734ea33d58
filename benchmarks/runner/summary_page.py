"""All outcomes on one page: machine, charts, tables, what got slower, what was left out and why.

One file without scripts that works offline; all text is escaped, and a content security policy lets nothing run and
nothing be loaded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import BENCHMARKS
from benchmarks.runner.findings import Figure
from benchmarks.runner.outcome import Comparison, Outcome
from gapless.view.template import filled, policy, source

_WIDTH, _ROW, _VALUE = 440, 40, 76  # of a chart, of a bar with its name, and of the value behind the longest bar


def render(outcomes: Mapping[str, Outcome], found: Comparison | None, *, quick: bool, missing: int = 0) -> str:
    """The page as text. `found` is None where there is nothing to compare with; `missing` parts were not run yet."""
    style = source("curves.css") + source("summary_page.css", "benchmarks.runner")
    told: Any = {"outcomes": list(outcomes.items()), "found": found, "quick": quick, "missing": missing}
    more = {"about": BENCHMARKS, "charts": charts, "style": style, "policy": policy(style)}
    return filled("summary_page.html", "benchmarks.runner", **told, **more)


def charts(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """Bars, a chart for each unit; the interval of the rounds is a line across the end of each bar."""
    units = dict.fromkeys(figure.unit for figure in figures)
    return [_chart([figure for figure in figures if figure.unit == unit]) for unit in units]


def _chart(figures: Sequence[Figure]) -> dict[str, Any]:
    ends = [end for each in figures for end in (each.value, each.low, each.high) if end is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)
    label = "; ".join(f"{each.name}: {each} ({each.between})" for each in figures)

    def place(value: float) -> float:
        return round(1 + (value - low) / ((high - low) or 1.0) * (_WIDTH - _VALUE), 1)

    bars = []
    for number, figure in enumerate(figures):
        start, end = sorted((place(0.0), place(figure.value)))
        spread = [place(each) for each in (figure.low, figure.high) if each is not None]
        bar = {"figure": figure, "top": _ROW * number, "start": start, "width": max(round(end - start, 1), 1)}
        bars.append({**bar, "spread": spread, "edge": max(end, *spread, end) + 6})
    return {"label": label, "bars": bars, "width": _WIDTH, "height": _ROW * len(figures)}
