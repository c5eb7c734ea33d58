"""Every way to train one model on K ranks, in the same run: when is a pipeline worth it, and when not?

Layers are linear ones, real work on this machine's cores, in two sizes: light, with many samples to few weights, and
heavy, with few samples to many weights.

    copies       K independent parts of the model at once, each with its own microbatches: meant as the limit
    plain        one process trains the whole model, the others have nothing to do
    gapless      our schedules on ranks, and in one process with a thread for each device
    torch        every schedule of torch.distributed.pipelining; it has no way to run in one process
    torchgpipe   in one process, where it is installed
    fsdp2        the whole model on every rank, weights shared out; each takes its share of the samples at once
    deepspeed    is not run: it needs to be installed and started by its own launcher

A pipeline sends activations and has a bubble; FSDP2 has no bubble and sends all weights. So FSDP2 is the better choice
where weights are light and microbatches enough for all ranks, and a pipeline where weights are heavy.
"""

import contextlib
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

from benchmarks.emulated import pipeline, step
from benchmarks.peer import torchgpipe_side
from benchmarks.peer.contest import Contest
from benchmarks.peer.launcher import Launcher
from benchmarks.peer.peer import Peer, SideName, modules
from benchmarks.peer.torch_side import ALL
from benchmarks.runner.outcome import Figure, Grid, of_rounds
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, Schedules
from benchmarks.runner.report import milliseconds as in_ms
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Contestant, Progress, median, ratio, silent, take_turns
from gapless.errors import ConfigError
from gapless.stage.intra_op import intra_op_threads
from gapless.units import show_count

_SIZES = {"light": (256, 64), "heavy": (1024, 2)}  # width, and samples in a microbatch


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 16,
    layers: Annotated[int, "linear layers of a device"] = 4,
    schedules: Schedules = ("1f1b", "zb-h1"),
    sizes: Annotated[tuple[str, ...], "which sizes: light, heavy"] = tuple(_SIZES),
    rounds: Rounds = 7,
    progress: Progress = silent,
) -> dict[str, Any]:
    """A row for each size and way."""
    if layers % 2:
        raise ConfigError(
            f"{show_count(layers, 'layer')} can't be cut into 2 stages for each device: choose an even number"
        )
    if wrong := [size for size in sizes if size not in _SIZES]:
        raise ConfigError(f"there is no size {wrong[0][:40]!r}: it is one of {', '.join(_SIZES)}")
    skipped = {"deepspeed": "it is not run here, since it must be started by its own launcher"}
    if find_spec("deepspeed") is None:
        skipped["deepspeed"] = "DeepSpeed is not installed"
    sides: dict[SideName, tuple[str, ...]] = {"parts": ("parts", "whole"), "gapless": tuple(schedules), "torch": ALL}
    sides["fsdp"] = ("fsdp2",)
    if why := torchgpipe_side.missing():
        skipped["torchgpipe"] = why
    else:
        sides["torchgpipe"] = ("gpipe",)
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as all_:
        launcher = Launcher(*modules(*sides))
        all_.callback(launcher.close)
        all_.enter_context(intra_op_threads(1))
        for size in sizes:
            width, samples = _SIZES[size]
            contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
            with contextlib.ExitStack() as stack:
                contestants: dict[str, Contestant] = {}
                peers: dict[SideName, Peer] = {}
                for name in schedules:
                    pipe = stack.enter_context(pipeline(contest, name))
                    contestants[f"gapless, one process {name}"] = step(contest, pipe, on_all_cores=True)
                for side, names in sides.items():
                    progress(f"{size}: starting {side}")
                    peer = stack.enter_context(Peer(contest, names, side, launcher=launcher))
                    peers[side] = peer
                    there = [name for name in names if name not in peer.refused]
                    contestants |= {_named(side, name): partial(peer.step, name) for name in there}
                seconds = take_turns(contestants, rounds, partial(_told, progress, size))
            for side, peer in peers.items():
                skipped |= {f"{_named(side, name)}, {size}": why for name, why in peer.refused.items()}
            limit = seconds["copies"]
            rows += [
                {"size": size, "way": way, "rounds": values, "of_limit": ratio(limit, values)}
                for way, values in seconds.items()
            ]
    progress("")
    return {"rows": rows, "skipped": skipped}


def _told(progress: Progress, size: str, line: str) -> None:
    progress(f"{size}: {line}" if line else "")


def _named(side: str, name: str) -> str:
    own = {"parts": "copies", "whole": "plain", "fsdp2": "fsdp2"}
    return own.get(name, f"{'gapless, ranks' if side == 'gapless' else side} {name}")


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """The step of each way."""
    return [
        of_rounds(f"{row['size']}: {row['way']}", row["rounds"], by="gapless" if "gapless" in row["way"] else "other")
        for row in found["rows"]
    ]


def tables(found: Mapping[str, Any]) -> list[Grid]:
    """Quickest first."""
    left_out = [f"{name}: {why}." for name, why in found["skipped"].items()]
    note = " ".join([*_verdicts(found), *left_out])
    ranks, parts = show_count(found["devices"], "rank"), show_count(found["microbatches"], "microbatch")
    title = f"Every way to train on {ranks}, {parts}, quickest first"
    return [Grid(title, ("size", "way", "step", "rounds", "of the limit"), _cells(found), note)]


def _verdicts(found: Mapping[str, Any]) -> list[str]:
    """For each size: our best against torch's best, by the medians."""
    said = []
    for size in dict.fromkeys(row["size"] for row in found["rows"]):
        steps = {row["way"]: median(row["rounds"]) for row in found["rows"] if row["size"] == size}
        best = {
            side: min((way for way in steps if way.startswith(side)), key=steps.__getitem__, default=None)
            for side in ("gapless", "torch ")
        }
        ours, theirs = best.values()
        if ours is not None and theirs is not None:
            said.append(f"{size}: {ours} is {steps[theirs] / steps[ours]:.2f} times as fast as {theirs}.")
    return said


def _cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    order = list(dict.fromkeys(row["size"] for row in found["rows"]))
    ranked = sorted(found["rows"], key=lambda row: (order.index(row["size"]), median(row["rounds"])))
    return [
        (
            row["size"],
            row["way"],
            in_ms(median(row["rounds"]), 2),
            f"{in_ms(min(row['rounds']), 2)} to {in_ms(max(row['rounds']), 2)}",
            f"{100 * row['of_limit']:.0f}%",
        )
        for row in ranked
    ]


def report(found: dict[str, Any]) -> str:
    """A line for each way."""
    grid = tables(found)[0]
    left = [f"left out: {name}: {why}" for name, why in found["skipped"].items()]
    return tabular(grid.title, grid.headings, grid.rows, "", *_verdicts(found), *left, left=2)
