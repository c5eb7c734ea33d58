"""All outcomes on one page: machine, charts, tables, what got slower, what was left out and why.

One file without scripts that works offline; all text is escaped, and a content security policy lets nothing run and
nothing be loaded.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files

from benchmarks import BENCHMARKS
from benchmarks.runner.chart import charts
from benchmarks.runner.outcome import Figure, Grid, Outcome, between, shown
from benchmarks.runner.slower import Comparison
from gapless.view.template import hash_of, source, text


def render(outcomes: Mapping[str, Outcome], found: Comparison | None, *, quick: bool, missing: int = 0) -> str:
    """The page as text. `found` is None where there is nothing to compare with; `missing` parts were not run yet."""
    style = source("curves.css") + files("benchmarks.runner").joinpath("sheet.css").read_text("utf-8")
    policy = f"default-src 'none'; style-src 'sha256-{hash_of(style)}'; base-uri 'none'; form-action 'none'"
    ran = {key: each for key, each in outcomes.items() if not each.skipped}
    skipped = {key: each for key, each in outcomes.items() if each.skipped}
    parts = [
        f"<h1>gapless benchmarks · {len(ran)} measured{f', {len(skipped)} left out' if skipped else ''}</h1>",
        _machine(list(outcomes.values())),
        '<p class="warn">Quick sizes: they show that everything runs, and their figures mean little.</p>'
        if quick
        else "",
        f'<p class="warn">The run was stopped: {missing} parts are missing.</p>' if missing else "",
        _slower(found),
        *(_section(key, each) for key, each in ran.items()),
        _skipped(skipped),
    ]
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>gapless benchmarks</title><style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _machine(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    last = outcomes[-1]
    tiles = {"date": last.date, **{name: str(value) for name, value in last.environment.items()}}
    drawn = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in tiles.items())
    return f'<dl class="tiles">{drawn}</dl>'


def _slower(found: Comparison | None) -> str:
    if found is None:
        return ""
    verdict = found.verdict("the run before")
    said = text(f"{verdict[:1].upper()}{verdict[1:]}.")
    if not found.worse:
        return f'<p class="{"good" if found.compared else "warn"}">{said}</p>'
    lines = "".join(f"<li>{text(str(each))}</li>" for each in found.worse)
    return f'<section class="card"><h2>Slower than before</h2><p>{said}</p><ul>{lines}</ul></section>'


def _section(key: str, outcome: Outcome) -> str:
    about = BENCHMARKS[outcome.name].about if outcome.name in BENCHMARKS else ""
    return (
        f'<section class="card" id="{text(key)}"><h2>{text(key)}</h2><p>{text(about[:1].upper() + about[1:])}.</p>'
        f"<p><code>{text(outcome.command)}</code></p>{charts(outcome.figures)}{_figures(outcome.figures)}"
        f"{''.join(map(_grid, outcome.tables))}"
        f"<details><summary>What the command prints</summary><pre>{text(outcome.report)}</pre></details></section>"
    )


def _figures(figures: Sequence[Figure]) -> str:
    if not figures:
        return ""
    rows = [(each.name, shown(each.value, each.unit), between(each), each.meant) for each in figures]
    grid = _grid(Grid("", ("what counts", "median", "rounds", "meant"), rows))
    return f"<details><summary>The figures as a table</summary>{grid}</details>"


def _grid(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{text(each)}</th>' for each in grid.headings)
    rows = "\n".join(
        f'<tr><th scope="row">{text(name)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in cells)}</tr>'
        for name, *cells in grid.rows
    )
    title = f"<h3>{text(grid.title)}</h3>" if grid.title else ""
    note = f'<p class="muted">{text(grid.note)}</p>' if grid.note else ""
    return (
        f'{title}<div class="scroller"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}'
    )


def _skipped(skipped: Mapping[str, Outcome]) -> str:
    if not skipped:
        return ""
    rows = [(key, each.skipped, each.command) for key, each in skipped.items()]
    return f'<section class="card"><h2>Left out</h2>{_grid(Grid("", ("part", "why", "command"), rows))}</section>'
