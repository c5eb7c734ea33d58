"""Figures as bars: one chart for each unit, the interval of the rounds as a line across the end of each bar."""

from collections.abc import Sequence

from benchmarks.runner.outcome import Figure, between, shown
from gapless.view.template import text

_WIDTH, _ROW, _BAR, _VALUE = 440, 40, 12, 76


def charts(figures: Sequence[Figure]) -> str:
    """As SVG, one below the other."""
    units = list(dict.fromkeys(figure.unit for figure in figures))
    return "".join(_chart([figure for figure in figures if figure.unit == unit]) for unit in units)


def _chart(figures: Sequence[Figure]) -> str:
    ends = [end for each in figures for end in (each.value, each.low, each.high) if end is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)

    def place(value: float) -> float:
        return 1 + (value - low) / ((high - low) or 1.0) * (_WIDTH - _VALUE)

    drawn = []
    for number, figure in enumerate(figures):
        top = _ROW * number
        middle = top + 18 + _BAR / 2
        start, end = sorted((place(0.0), place(figure.value)))
        kind = "own" if figure.by == "gapless" else "other"
        drawn.append(f'<text class="name" x="0" y="{top + 13}">{text(figure.name)}</text>')
        drawn.append(
            f'<rect class="{kind}" x="{start:.1f}" y="{top + 18}" width="{max(end - start, 1):.1f}" height="{_BAR}"/>'
        )
        edge = end
        if figure.low is not None and figure.high is not None:
            least, most = place(figure.low), place(figure.high)
            edge = max(end, most)
            drawn.append(
                f'<path class="spread" d="M{least:.1f} {middle - 4:.1f}v8M{least:.1f} {middle:.1f}H{most:.1f}'
                f'M{most:.1f} {middle - 4:.1f}v8"/>'
            )
        value = text(shown(figure.value, figure.unit))
        drawn.append(f'<text class="value" x="{edge + 6:.1f}" y="{middle + 4:.1f}">{value}</text>')
    label = "; ".join(f"{each.name}: {shown(each.value, each.unit)} ({between(each)})" for each in figures)
    box = f'class="bars" viewBox="0 0 {_WIDTH} {_ROW * len(figures)}" role="img" aria-label="{text(label)}"'
    return f"<svg {box}>{''.join(drawn)}</svg>"
