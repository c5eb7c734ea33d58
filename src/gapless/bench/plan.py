"""Is the planner right? In its predictions, its cuts, its choices, and in what it says will fit.

prediction   a step and its memory, as planned and as measured
cuts         the planned partition against equal counts of layers, and against every cut there is
choice       the planned schedule against every other one that fits
fit          limits around what is predicted, on a GPU
"""

from typing import Annotated, Any

from gapless.bench.parameters import Between, Rounds
from gapless.bench.planner import choice, cuts, prediction
from gapless.bench.planner import fit as fit_
from gapless.bench.rounds import Progress, silent
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
