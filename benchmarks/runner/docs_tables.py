"""Tables of the docs, made from stored results: no number there is typed by hand.

    python -m benchmarks.runner.docs_tables docs/results.md docs/results/bench

writes what stands between the two marks of the file; with --check it only says whether that is what it would write.
Results are stored by `python -m benchmarks NAME --json docs/results/bench/NAME.json`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.runner.all import stored
from benchmarks.runner.findings import Table, as_markdown
from benchmarks.runner.outcome import Outcome
from gapless.cli import exit_code
from gapless.errors import ConfigError

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def rendered(folder: Path) -> str:
    """All results of a folder as Markdown."""
    outcomes = stored(folder)
    if not outcomes:
        raise ConfigError(f"there is no result in {folder}: store some with `python -m benchmarks NAME --json FILE`")
    rows = [
        ("" if number else f"`{each.command}`", figure.name, figure.meant, str(figure), figure.between)
        for each in outcomes.values()
        if not each.tables
        for number, figure in enumerate(each.figures)
    ]
    parts = [_machines(list(outcomes.values()))]
    if rows:
        parts.append(as_markdown(Table("", ("command", "what counts", "meant", "median", "rounds"), rows)))
    several = len({each.environment["cores"] for each in outcomes.values()}) > 1
    for each in outcomes.values():
        where = f", on {each.environment['cores']} cores" if several else ""
        parts += [f"`{each.command}`{where}\n\n{as_markdown(grid)}" for grid in each.tables]
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


def placed(text: str, made: str) -> str:
    """The text with `made` between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the file has no {BEGIN} and {END}: put both on lines of their own")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the file is as it is to be, 1 if --check finds that it is not, 2 if something is wrong."""
    return exit_code(_run, argv)


def _run(words: list[str]) -> int:
    names = [Path(word) for word in words if word != "--check"]
    if len(names) != 2:
        raise ConfigError("give a file and the folder of the results: FILE FOLDER")
    text = names[0].read_text("utf-8")
    wanted = placed(text, rendered(names[1]))
    if "--check" in words:
        return int(text != wanted)
    names[0].write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
