"""Every benchmark that can run here, as one page; says what got slower.

    FOLDER/0001/run.json          what this run is made of
    FOLDER/0001/emulated.json     the outcome of a part
    FOLDER/0002/...               the next run, which is compared with the last finished one

Every part is stored as soon as it has ended. A run without all its parts was stopped: the same command goes on with it.

example: python -m benchmarks all --html report.html
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks import ENTRIES
from benchmarks.runner import summary_page
from benchmarks.runner.findings import BenchmarkResult
from benchmarks.runner.outcome import Outcome, environment, measured, outcome, read, slower
from benchmarks.runner.parameters import one_of, parsed
from benchmarks.runner.rounds import Progress, silent, within, write_whole
from gapless.cli import terminal
from gapless.errors import ConfigError, GaplessError


def run(
    *,
    html: Annotated[Path | None, "write a page with all figures"] = None,
    results: Annotated[Path, "where results are kept, a folder for each run; a stopped run goes on"] = Path(
        "gapless-results"
    ),
    compare: Annotated[Path | None, "say what got slower than in this run (default: the last)", Path] = None,
    only: Annotated[tuple[str, ...], "only these parts", one_of("part", *ENTRIES)] = tuple(ENTRIES),
    quick: Annotated[bool, "small sizes, to see that everything runs"] = False,
    progress: Progress = silent,
) -> BenchmarkResult:
    """Says what is done as it goes; what was done is kept also where it is stopped."""
    if compare and not compare.is_dir():
        raise ConfigError(f"there is no folder {str(compare)[:200]} to compare with: give the folder of a run")
    keys = [key for key in ENTRIES if key in only]
    runs = Runs(results)
    folder, goes_on = runs.open(keys, quick=quick)
    earlier = compare or runs.before(folder)
    before = stored(earlier) if earlier else None  # looked at before the work, not after
    if goes_on:
        terminal.say(f"going on with the run in {folder}: {len(stored(folder))} of {len(keys)} parts are done")
    try:
        run_all(folder, keys, quick=quick, progress=progress, done=_say_done)
    finally:
        progress("")
        outcomes = stored(folder)
        slow = None if before is None else slower(before, outcomes)
        if slow is not None:
            terminal.say("\n  ".join([slow.verdict(f"{earlier}"), *slow.worse]))
        if html:
            page = summary_page.render(outcomes, slow, quick=quick, missing=len(keys) - len(outcomes))
            html.write_text(page, "utf-8")
        terminal.say(f"the results are in {folder}: {len(outcomes)} of {len(keys)} parts")
    return BenchmarkResult()


def _say_done(key: str, outcome: Any) -> None:
    terminal.show_progress("")
    terminal.say(f"{key}: left out, {outcome.skipped}" if outcome.skipped else f"{key}: done")
    terminal.flush()


class Runs:
    """Those in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: give a folder for the results")
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, keys: Sequence[str], *, quick: bool) -> tuple[Path, bool]:
        """The unfinished run of the same parts on the same machine, or a new one; and whether it goes on."""
        wanted = {"quick": quick, "parts": list(keys), "environment": environment()}
        last = next(self._numbered(), None)
        if last and _manifest(last) == wanted and not _is_finished(last):
            return last, True
        folder = self._folder / f"{int(last.name) + 1 if last else 1:04}"
        folder.mkdir()
        write_whole(folder / "run.json", wanted)
        return folder, False

    def before(self, run: Path) -> Path | None:
        """The last finished one of the same kind before it."""
        quick, earlier = _manifest(run).get("quick"), (each for each in self._numbered() if each.name < run.name)
        return next((each for each in earlier if _manifest(each).get("quick") == quick and _is_finished(each)), None)

    def _numbered(self) -> Iterator[Path]:
        """The last one first."""
        return iter(sorted(filter(_is_run, self._folder.iterdir()), reverse=True))


def _is_run(folder: Path) -> bool:
    return folder.is_dir() and folder.name.isdigit()


def _manifest(run: Path) -> dict[str, Any]:
    """What it is made of; nothing where nobody can tell."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run / "run.json").read_text("utf-8"))
        return found
    return {}


def _is_finished(run: Path) -> bool:
    return "parts" in (made := _manifest(run)) and all((run / f"{part}.json").exists() for part in made["parts"])


def stored(run: Path) -> dict[str, Outcome]:
    """The outcomes in a folder, by their parts, in the order of the suite."""
    found = {file.stem: read(file) for file in sorted(run.glob("*.json")) if file.name != "run.json"}
    return {key: found[key] for key in ENTRIES if key in found} | found


def run_all(
    run: Path, keys: Sequence[str], *, quick: bool, progress: Progress, done: Callable[[str, Outcome], None]
) -> None:
    """All parts that are not stored yet, one after another; each is stored as soon as it is there."""
    there = stored(run)
    for number, key in enumerate(keys):
        if key in there:
            continue
        entry = ENTRIES[key]
        at = f"[{number + 1} of {len(keys)}] {key}"
        progress(at)
        given, _ = parsed(entry.benchmark, (entry.quick if quick else entry.words).split())
        if "keep" in given:  # so that it goes on in the middle
            given["keep"] = run / f"{key}.part"
        try:
            made = measured(entry.benchmark, given, within(progress, at))
        except GaplessError as error:  # it can't run here
            made = outcome(entry.benchmark, given, skipped=str(error))
        made.write(run / f"{key}.json")
        done(key, made)
