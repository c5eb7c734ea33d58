"""Layers so small that a step is all overhead: our 1f1b against torch's, on the same layers."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from benchmarks.emulated import pipeline, step
from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Peer
from benchmarks.runner.outcome import Figure, of_rounds, quotients
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, Steps
from benchmarks.runner.report import fight, told
from benchmarks.runner.rounds import GaveUpError, Progress, silent
from gapless.errors import TransportError
from gapless.stage.intra_op import intra_op_threads

TARGET = 1.2


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
) -> dict[str, Any]:
    """Our devices are threads of this process, torch's are processes; each has one intra-op thread."""
    contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
    with intra_op_threads(1):
        progress("starting torch.distributed.pipelining")
        with pipeline(contest, "1f1b") as pipe, Peer(contest, ["1f1b"]) as peer:
            theirs = partial(_needed, peer, steps)
            found = fight(step(contest, pipe, steps), "torch", theirs, rounds, progress)
    return found | {"target": TARGET}


def _needed(peer: Peer, steps: int) -> float:
    """There is nothing to compare with where the only peer gives up."""
    try:
        return peer.step("1f1b", steps)
    except GaveUpError as why:
        raise TransportError(f"there is nothing to compare with: {why}") from None


def report(found: dict[str, Any]) -> str:
    """Both times, and by how much ours is the shorter one."""
    return told(
        f"1f1b, {found['devices']} devices, {found['microbatches']} microbatches of {found['samples']}, "
        f"{found['layers']} linear layers of width {found['width']} per stage",
        {"gapless": found["seconds"], "torch": found["torch_seconds"]},
        ("faster by", f"{found['ratio']:.2f}x", f"at least {found['target']}"),
    )


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """By how much ours is the shorter one."""
    gains = quotients(found["rounds"]["torch"], found["rounds"]["gapless"])
    return [of_rounds("faster than torch's 1F1B by", gains, "x", "more", f"at least {found['target']}")]
