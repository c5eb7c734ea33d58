"""All benchmarks in one go, for `python -m benchmarks all`: which, with which options, and what is kept of them.

    FOLDER/0001/run.json          what this run is made of
    FOLDER/0001/emulated.json     the outcome of a part
    FOLDER/0002/...               the next run, which is compared with the last finished one

Every part is stored as soon as it has ended. A run without all its parts was stopped: the same command goes on with it.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ENTRIES
from benchmarks.runner.outcome import Outcome, environment, measured, outcome, read
from benchmarks.runner.parameters import parsed
from benchmarks.runner.rounds import Progress, within, write_whole
from gapless.errors import ConfigError, GaplessError


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
        there = self._numbered()
        if there and _manifest(there[-1]) == wanted and not _is_finished(there[-1]):
            return there[-1], True
        folder = self._folder / f"{int(there[-1].name) + 1 if there else 1:04}"
        folder.mkdir()
        write_whole(folder / "run.json", wanted)
        return folder, False

    def before(self, run: Path) -> Path | None:
        """The last finished one of the same kind before it."""
        quick, earlier = _manifest(run).get("quick"), [each for each in self._numbered() if each.name < run.name]
        alike = (each for each in reversed(earlier) if _manifest(each).get("quick") == quick and _is_finished(each))
        return next(alike, None)

    def _numbered(self) -> list[Path]:
        return sorted(each for each in self._folder.iterdir() if each.is_dir() and each.name.isdigit())


def _manifest(run: Path) -> dict[str, Any]:
    """What it is made of; nothing where nobody can tell."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((run / "run.json").read_text("utf-8"))
        return {key: found[key] for key in ("quick", "parts", "environment") if key in found}
    return {}


def _is_finished(run: Path) -> bool:
    return "parts" in (made := _manifest(run)) and all((run / f"{part}.json").exists() for part in made["parts"])


def stored(run: Path) -> dict[str, Outcome]:
    """The outcomes in a folder, by their parts, in the order of the suite."""
    found = {file.stem: read(file) for file in sorted(run.glob("*.json")) if file.name != "run.json"}
    order = list(ENTRIES)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


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
            made = outcome(entry.benchmark, given, measured(entry.benchmark, given, within(progress, at)))
        except GaplessError as error:  # it can't run here
            made = outcome(entry.benchmark, given, None, str(error))
        made.write(run / f"{key}.json")
        done(key, made)
