"""Tables of the docs, made from stored results: no number there is typed by hand.

    python -m benchmarks.runner.docs_tables docs/benchmarks.md docs/results/bench

writes what stands between the two marks of the file; with --check it only says whether that is what it would write.
Results are stored by `python -m benchmarks NAME --json docs/results/bench/NAME.json`.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.runner.outcome import Grid, Outcome, between, shown
from benchmarks.runner.suite import stored
from gapless.errors import ConfigError, GaplessError

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def rendered(folder: Path) -> str:
    """All results of a folder as Markdown."""
    outcomes = stored(folder)
    if not outcomes:
        raise ConfigError(f"there is no result in {folder}: store some with `python -m benchmarks NAME --json FILE`")
    single = [each for each in outcomes.values() if not each.tables]
    rows = [
        (
            f"`{each.command}`" if not number else "",
            figure.name,
            figure.meant,
            shown(figure.value, figure.unit),
            between(figure),
        )
        for each in single
        for number, figure in enumerate(each.figures)
    ]
    parts = [_machines(list(outcomes.values()))]
    if rows:
        parts.append(_markdown(Grid("", ("command", "what counts", "meant", "median", "rounds"), rows)))
    several = len({each.environment["cores"] for each in outcomes.values()}) > 1
    for each in outcomes.values():
        where = f", on {each.environment['cores']} cores" if several else ""
        parts += [f"`{each.command}`{where}\n\n{_markdown(grid)}" for grid in each.tables]
    return "\n\n".join(parts)


def _machines(outcomes: Sequence[Outcome]) -> str:
    """On what, and when."""
    known = {
        f"{each.environment['cpu']}, {each.environment['cores']} cores, {each.environment['os']}, "
        f"torch {each.environment['torch']}, Python {each.environment['python']}"
        for each in outcomes
    }
    days = sorted({each.date.split()[0] for each in outcomes})
    return f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {'; '.join(sorted(known))}."


def _markdown(grid: Grid) -> str:
    return "\n".join(_lines(grid))


def _lines(grid: Grid) -> Iterator[str]:
    if grid.title:
        yield f"**{grid.title}**\n"
    yield _line(grid.headings)
    yield "|" + "---|" * len(grid.headings)
    yield from map(_line, grid.rows)
    if grid.note:
        yield f"\n{grid.note}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def placed(text: str, made: str) -> str:
    """The text with `made` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no {BEGIN} and {END}: put both on lines of their own")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(words: Sequence[str]) -> int:
    """0 if the file is as it is to be, 1 if --check finds that it is not, 2 if something is wrong."""
    check, names = "--check" in words, [word for word in words if word != "--check"]
    if len(names) != 2:
        print((__doc__ or "").strip())
        return 2
    file, folder = map(Path, names)
    try:
        text = file.read_text("utf-8")
        wanted = placed(text, rendered(folder))
    except (GaplessError, OSError) as error:
        print(f"gapless: {error}", file=sys.stderr)
        return 2
    if check:
        return int(text != wanted)
    file.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
