"""Layers so small that a step is all overhead: our 1f1b against torch's, on the same layers.

example: python -m benchmarks tiny --microbatches 16
"""

from typing import Annotated

from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Lineup
from benchmarks.runner.findings import BenchmarkResult, duel, of_rounds
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, Steps
from benchmarks.runner.rounds import Progress, fight, silent
from gapless.stage.intra_op import intra_op_threads


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 32,
    width: Annotated[int, "width of the linear layers"] = 32,
    layers: Annotated[int, "linear layers in a stage"] = 2,
    samples: Annotated[int, "samples in a microbatch"] = 4,
    steps: Steps = 20,
    rounds: Rounds = 9,
    progress: Progress = silent,
) -> BenchmarkResult:
    """Our devices are threads of this process, torch's are processes; each has one intra-op thread."""
    contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
    with intra_op_threads(1), Lineup(contest, progress) as lineup:
        lineup.add_here(["1f1b"], steps=steps)
        lineup.add_ranks("torch", ["1f1b"], steps=steps)
        ours, theirs = lineup.contestants.values()
        found = fight(ours, "torch", theirs, rounds, progress)
    title = (
        f"1f1b, {devices} devices, {microbatches} microbatches of {samples}, {layers} linear layers of width {width} "
    )
    figure = of_rounds("faster than torch's 1F1B by", found["gains"], "x", "more", "at least 1.2")
    return duel(f"{title}per stage", found, figure)
