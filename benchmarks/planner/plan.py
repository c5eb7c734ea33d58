"""Is the planner right? In its predictions, its cuts, its choices, and in what it says will fit.

prediction   a step and its memory, as planned and as measured
cuts         the planned partition against equal counts of layers, and against every cut there is
choice       the planned schedule against every other one that fits
fit          limits around what is predicted, on a GPU

example: python -m benchmarks plan --parts cuts,choice
"""

from collections.abc import Callable
from typing import Annotated, Any

from benchmarks.planner import choice, prediction
from benchmarks.planner import fit as fit_
from benchmarks.runner.parameters import Between, Rounds, check_names
from benchmarks.runner.rounds import Progress, silent
from benchmarks.runner.told import Figure, Found, Told

PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {  # what measures, and what makes a table of it
    "prediction": (prediction.run, prediction.table),
    "cuts": (choice.cuts, choice.cuts_table),
    "choice": (choice.run, choice.table),
}


def run(
    *,
    parts: Annotated[tuple[str, ...], "which parts of the planner to check"] = tuple(PARTS),
    rounds: Rounds = 7,
    seconds: Annotated[float, "seconds to measure a model", Between(0.001, 600)] = 4.0,
    fit: Annotated[bool, "check only what fits on an NVIDIA GPU, predicted and measured"] = False,
    quick: Annotated[bool, "measure one small model for each part, to see that it runs"] = False,
    progress: Progress = silent,
) -> Found:
    """`fit` is that part alone, since nothing else needs a GPU."""
    check_names("part", parts, list(PARTS))
    if fit:
        return {"fit": fit_.run(seconds=seconds, progress=progress)}
    return {part: PARTS[part][0](rounds=rounds, seconds=seconds, quick=quick, progress=progress) for part in parts}


_FIGURES = {
    ("prediction", "difference"): "predicted to measured step",
    ("prediction", "bytes_difference"): "predicted to measured peak",
    ("cuts", "slower_than_best"): "the planned cut to the best of all",
    ("choice", "slower"): "the picked schedule to the quickest",
    ("fit", "difference"): "predicted to measured peak on a GPU",
}


def told(found: Found) -> Told:
    """The parts that were asked for, one after another, and the worst of each."""
    tables = [PARTS[part][1](found[part]["rows"]) for part in PARTS if found.get(part)]
    tables += [fit_.table(found["fit"])] if found["fit"] else []
    figures = []
    for (part, key), what in _FIGURES.items():
        rows = found[part]["rows"] if found.get(part) else []
        known = [row[key] for row in rows if row[key] is not None]
        meant = "at most +3%" if part in ("cuts", "choice") else "-5% to +10%"
        for word, end in (("least", min), ("greatest", max)) if known else ():
            figures.append(Figure(f"{what}, {word} of {len(known)}", end(known), "difference", meant=meant))
    return Told(figures, tables)
