"""Layers so small that a step is all overhead: our 1f1b against torch's, on the same layers."""

from typing import Any

from gapless.bench.emulated import pipeline, step
from gapless.bench.peer.contest import Contest
from gapless.bench.peer.peer import Peer
from gapless.bench.rounds import Progress, median, ratio, silent, take_turns
from gapless.stage.intra_op import intra_op_threads

TARGET = 1.2


def run(
    *,
    devices: int,
    microbatches: int,
    width: int,
    layers: int,
    samples: int,
    steps: int,
    rounds: int,
    progress: Progress = silent,
) -> dict[str, Any]:
    contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
    with intra_op_threads(1):  # as the ranks have
        progress("starting torch.distributed.pipelining")
        with pipeline(contest, "1f1b") as pipe, Peer(contest, ["1f1b"]) as peer:
            contestants = {"gapless": step(contest, pipe, steps), "torch": lambda: peer.step("1f1b", steps)}
            seconds = take_turns(contestants, rounds, progress)
    return {
        "benchmark": "tiny",
        "devices": devices,
        "microbatches": microbatches,
        "width": width,
        "layers": layers,
        "samples": samples,
        "steps": steps,
        "seconds": median(seconds["gapless"]),
        "torch_seconds": median(seconds["torch"]),
        "ratio": ratio(seconds["torch"], seconds["gapless"]),
        "target": TARGET,
        "rounds": seconds,
    }


def report(found: dict[str, Any]) -> str:
    return "\n".join(
        [
            (
                f"1f1b, {found['devices']} devices, {found['microbatches']} microbatches of {found['samples']}, "
                f"{found['layers']} linear layers of width {found['width']} per stage"
            ),
            "",
            f"gapless        {1000 * found['seconds']:8.2f} ms per step",
            f"torch          {1000 * found['torch_seconds']:8.2f} ms per step",
            f"faster by      {found['ratio']:8.2f}x   median of the rounds; meant: at least {found['target']}",
        ]
    )
