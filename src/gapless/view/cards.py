"""Pieces of HTML that stand beside the timelines of a page: figures, bars, tables and lists. All text is escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate

from gapless.view.summary import text

Share = tuple[str, float, str]  # a name, how much of the whole it is, and that as people read it


def style() -> str:
    """The style sheet of all pieces; their colours are those of the page."""
    return files("gapless.view").joinpath("cards.css").read_text(encoding="utf-8")


def section(label: str, *parts: str) -> str:
    """Pieces below each other."""
    return f'<section class="report" aria-label="{text(label)}">' + "\n".join(filter(None, parts)) + "</section>"


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Names and what is to be seen first of all."""
    body = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in figures)
    return f'<dl class="tiles">{body}</dl>'


def card(title: str, *parts: str, name: str = "") -> str:
    """A box with a heading; `name` is for links to it."""
    known = f' id="{name}"' if name else ""
    return f'<div class="card"{known}><h2>{text(title)}</h2>{"".join(parts)}</div>'


def paragraph(words: str) -> str:
    """A few sentences."""
    return f"<p>{text(words)}</p>"


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """A table of two columns."""
    body = "".join(f'<tr><th scope="row">{text(name)}</th><td>{text(value)}</td></tr>' for name, value in rows)
    return f"<table><tbody>{body}</tbody></table>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], marked: int = -1) -> str:
    """A table whose first column names the row; one row may be marked. It scrolls by itself where it is too wide."""
    head = "".join(f'<th scope="col">{text(heading)}</th>' for heading in headings)
    body = []
    for number, (name, *cells) in enumerate(rows):
        kind = ' class="marked"' if number == marked else ""
        found = "".join(f"<td>{text(cell)}</td>" for cell in cells)
        body.append(f'<tr{kind}><th scope="row">{text(name)}</th>{found}</tr>')
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="Table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def parts_of(label: str, shares: Sequence[Share]) -> str:
    """One bar of all parts, and a table that says which is which."""
    bar, rows, at = [], [], 0.0
    for number, (name, share, words) in enumerate(shares):
        bar.append(rectangle(number, at, share))
        head = f'<th scope="row">{swatch(number)}{text(name)}</th>'
        rows.append(f"<tr>{head}<td>{text(words)}</td><td>{100 * share:.1f}%</td></tr>")
        at += share
    drawn = f'<svg class="bars" viewBox="0 0 1000 18" preserveAspectRatio="none" role="img" aria-label="{text(label)}">'
    return f"{drawn}{''.join(bar)}</svg><table><tbody>{''.join(rows)}</tbody></table>"


@dataclass(frozen=True)
class Stack:
    """A bar of several parts, each a share of the longest bar or limit; `limit` is a mark in it."""

    name: str
    shares: Sequence[float]
    words: str
    limit: float | None = None


def stacks(label: str, parts: Sequence[str], bars: Iterable[Stack]) -> str:
    """Bars below each other, and what their colours mean."""
    rows = []
    for bar in bars:
        ends = list(accumulate(bar.shares, initial=0.0))
        drawn = "".join(rectangle(n, at, share) for n, (at, share) in enumerate(zip(ends, bar.shares, strict=False)))
        mark = "" if bar.limit is None else f'<path class="limit" d="M{min(997.0, 1000 * bar.limit):.2f} 0V18"/>'
        picture = (
            f'<svg class="bars" viewBox="0 0 1000 18" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(bar.name)}: {text(bar.words)}">{drawn}{mark}</svg>'
        )
        rows.append(f'<tr><th scope="row">{text(bar.name)}</th><td>{picture}</td><td>{text(bar.words)}</td></tr>')
    keys = "".join(f"<li>{swatch(number)}{text(part)}</li>" for number, part in enumerate(parts))
    return (
        f'<table class="stacks" aria-label="{text(label)}"><tbody>{"".join(rows)}</tbody></table>'
        f'<ul class="key">{keys}</ul>'
    )


def rectangle(number: int, at: float, share: float, height: int = 18) -> str:
    """A part of a bar that is 1000 wide."""
    place = f'x="{1000 * at:.2f}" y="0" width="{1000 * share:.2f}" height="{height}"'
    return f'<rect class="part-{number}" {place}/>'


def swatch(number: int) -> str:
    """The colour of a part."""
    return sample(f'<rect class="part-{number}" width="14" height="10"/>')


def sample(drawing: str) -> str:
    """A small drawing in a line of text."""
    return f'<svg class="swatches" viewBox="0 0 14 10" aria-hidden="true">{drawing}</svg>'


def folded(title: str, *parts: str) -> str:
    """What only some want to see."""
    return f'<details class="card"><summary>{text(title)}</summary>{"".join(parts)}</details>'


def beside(*parts: str) -> str:
    """Pieces beside each other, where there is room."""
    return f'<div class="panels">{"".join(parts)}</div>'


def listing(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A folded table of two columns, as a section of its own."""
    return section(title, folded(title, pairs(rows)))


def verbatim(words: str) -> str:
    """Lines that stay as they are."""
    return f"<pre>{text(words)}</pre>"
