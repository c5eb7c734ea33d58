"""Layers so small that a step is all overhead: our 1f1b against torch's, on the same layers.

example: python -m benchmarks tiny --microbatches 16
"""

from functools import partial
from typing import Annotated

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import pipeline, step
from benchmarks.peer.peer import Peer
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, Steps
from benchmarks.runner.rounds import GaveUpError, Progress, fight, quotients, silent
from benchmarks.runner.told import Found, Told, of_rounds, told_duel
from gapless.errors import TransportError
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
) -> Found:
    """Our devices are threads of this process, torch's are processes; each has one intra-op thread."""
    contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
    with intra_op_threads(1):
        progress("starting torch.distributed.pipelining")
        with pipeline(contest, "1f1b") as pipe, Peer(contest, ["1f1b"]) as peer:
            theirs = partial(_needed, peer, steps)
            return fight(step(contest, pipe, steps), "torch", theirs, rounds, progress) | {"target": 1.2}


def _needed(peer: Peer, steps: int) -> float:
    """There is nothing to compare with where the only peer gives up."""
    try:
        return peer.step("1f1b", steps)
    except GaveUpError as why:
        raise TransportError(f"there is nothing to compare with: {why}") from None


def told(found: Found) -> Told:
    """Both times, and by how much ours is the shorter one."""
    gains = quotients(found["rounds"]["torch"], found["rounds"]["gapless"])
    title = "1f1b, {devices} devices, {microbatches} microbatches of {samples}, {layers} linear layers of width "
    figure = of_rounds("faster than torch's 1F1B by", gains, "x", "more", f"at least {found['target']}")
    return told_duel(f"{title}{{width}} per stage", found, figure)
