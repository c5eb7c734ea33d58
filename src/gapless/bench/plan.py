"""Is the planner right? In its predictions, its cuts, its choices, and in what it says will fit.

prediction   a step and its memory, as planned and as measured
cuts         the planned partition against equal counts of layers, and against every cut there is
choice       the planned schedule against every other one that fits
fit          limits around what is predicted, on a GPU
"""

from collections.abc import Sequence
from typing import Any

from gapless.bench.planner import choice as plan_choice
from gapless.bench.planner import cuts as plan_cuts
from gapless.bench.planner import fit as plan_fit
from gapless.bench.planner import prediction as plan_prediction
from gapless.bench.rounds import Progress, silent
from gapless.errors import ConfigError

PARTS = ("prediction", "cuts", "choice")
_MODULES = {"prediction": plan_prediction, "cuts": plan_cuts, "choice": plan_choice, "fit": plan_fit}


def run(
    *,
    parts: Sequence[str],
    rounds: int,
    seconds: float,
    fit: bool = False,
    quick: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """`fit` is that part alone, since nothing else needs a GPU."""
    wrong = [part for part in parts if part not in PARTS]
    if wrong:
        raise ConfigError(f"there is no part {wrong[0][:40]!r}: it is {', '.join(PARTS)}")
    found: dict[str, Any] = {"benchmark": "plan", "rounds": rounds}
    if fit:
        return found | {"fit": plan_fit.run(seconds=seconds, progress=progress)}
    for part in parts:
        found[part] = _MODULES[part].run(rounds=rounds, seconds=seconds, quick=quick, progress=progress)
    return found


def report(found: dict[str, Any]) -> str:
    return "\n\n".join(f"{part}\n{module.report(found[part])}" for part, module in _MODULES.items() if part in found)
