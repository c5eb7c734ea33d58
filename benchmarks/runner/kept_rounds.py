"""Rounds that a file keeps, so that a long contest can be run in parts: the same command goes on where it ended."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.runner.rounds import Contestant, Progress, silent, take_turns
from gapless.errors import ConfigError


class KeptRounds:
    """Those of one contest. `settings` say which: a file that keeps those of another one is refused."""

    def __init__(self, file: Path | None, settings: Mapping[str, Any], minutes: float) -> None:
        self._file, self._settings = file, json.loads(json.dumps(settings))
        self._until = time.monotonic() + 60 * minutes
        self.seconds: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}  # that a part need not find out again
        if file is not None and file.exists() and file.stat().st_size:
            self._read(file)

    def _read(self, file: Path) -> None:
        try:
            found = json.loads(file.read_text())
            settings, self.seconds, self.facts = found["settings"], found["seconds"], found["facts"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file} does not keep rounds of a benchmark: give another file") from None
        for name in sorted({*settings, *self._settings}):
            there, here = settings.get(name), self._settings.get(name)
            if there != here:
                raise ConfigError(
                    f"{file} keeps rounds with {name} = {there}, and this is {here}: give another file, or delete it"
                )

    def take_turns(
        self, contestants: Mapping[str, Contestant], rounds: int, progress: Progress = silent
    ) -> dict[str, list[float]]:
        """The seconds of each contestant in all rounds so far. Ends early where the minutes are over, if what there is
        is kept.
        """
        contestants = {name: step for name, step in contestants.items() if name not in self.facts.get("gave up", ())}
        if self.seconds and self.seconds.keys() != contestants.keys():
            raise ConfigError(f"{self._file} keeps rounds of other contestants: give another file, or delete it")
        self.seconds = self.seconds or {name: [] for name in contestants}
        warmup = 1
        while (done := min(map(len, self.seconds.values()))) < rounds:
            taken = take_turns(contestants, 1, _at(progress, done + 1, rounds), warmup)
            if gone := [name for name in contestants if name not in taken]:
                self.facts["gave up"] = [*self.facts.get("gave up", ()), *gone]
            contestants = {name: contestants[name] for name in taken}
            self.seconds = {name: [*self.seconds[name], *taken[name]] for name in taken}
            warmup = 0
            self.write()
            if self._file is not None and time.monotonic() > self._until:
                break
        return self.seconds

    def write(self) -> None:
        """Whole or not at all."""
        if self._file is None:
            return
        aside = self._file.with_name(f"{self._file.name}.part")
        aside.write_text(json.dumps({"settings": self._settings, "seconds": self.seconds, "facts": self.facts}))
        os.replace(aside, self._file)


def _at(progress: Progress, number: int, rounds: int) -> Progress:
    return lambda text: progress(text.replace("round 1 of 1:", f"round {number} of {rounds}:"))
