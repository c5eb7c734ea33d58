"""Is the planner right? In its predictions, its cuts, its choices, and in what it says will fit.

prediction   a step and its memory, as planned and as measured
cuts         the planned partition against equal counts of layers, and against every cut there is
choice       the planned schedule against every other one that fits
fit          limits around what is predicted, on a GPU
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from benchmarks.planner import choice, cuts, prediction
from benchmarks.planner import fit as fit_
from benchmarks.runner.outcome import Figure
from benchmarks.runner.parameters import Between, Rounds
from benchmarks.runner.rounds import Progress, silent
from gapless.errors import ConfigError

PARTS = {"prediction": prediction, "cuts": cuts, "choice": choice}


def run(
    *,
    parts: Annotated[tuple[str, ...], "which parts of the planner to check"] = tuple(PARTS),
    rounds: Rounds = 7,
    seconds: Annotated[float, "seconds to measure a model", Between(0.001, 600)] = 4.0,
    fit: Annotated[bool, "check only what fits on an NVIDIA GPU, predicted and measured"] = False,
    quick: Annotated[bool, "measure one small model for each part, to see that it runs"] = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`fit` is that part alone, since nothing else needs a GPU."""
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        raise ConfigError(f"there is no part {wrong[0][:40]!r}: it is {', '.join(PARTS)}")
    if fit:
        return {"fit": fit_.run(seconds=seconds, progress=progress)}
    return {part: PARTS[part].run(rounds=rounds, seconds=seconds, quick=quick, progress=progress) for part in parts}


def report(found: dict[str, Any]) -> str:
    """The parts that were asked for, one after another."""
    modules = {**PARTS, "fit": fit_}
    return "\n\n".join(f"{part}\n{modules[part].report(found[part])}" for part in modules if found.get(part))


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """The worst of each part: what was predicted against what was measured."""
    return [figure for part in (*PARTS, "fit") if found.get(part) for figure in _figures(part, found[part]["rows"])]


def _figures(part: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    keys = {
        "prediction": (
            ("difference", "predicted to measured step"),
            ("bytes_difference", "predicted to measured peak"),
        ),
        "cuts": (("slower_than_best", "the planned cut to the best of all"),),
        "choice": (("slower", "the picked schedule to the quickest"),),
        "fit": (("difference", "predicted to measured peak on a GPU"),),
    }
    meant = {"prediction": "-5% to +10%", "cuts": "at most +3%", "choice": "at most +3%", "fit": "-5% to +10%"}[part]
    for key, what in keys[part]:
        known = [row[key] for row in rows if row[key] is not None]
        if known:
            yield Figure(f"{what}, least of {len(known)}", min(known), "difference", meant=meant)
            yield Figure(f"{what}, greatest of {len(known)}", max(known), "difference", meant=meant)
