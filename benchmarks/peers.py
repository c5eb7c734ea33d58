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

example: python -m benchmarks peers --devices 2 --sizes light
"""

from importlib.util import find_spec
from typing import Annotated

from benchmarks.peer.contest import Contest
from benchmarks.peer.other_sides import ALL, missing_torchgpipe
from benchmarks.peer.peer import Lineup, SideName
from benchmarks.runner.findings import BenchmarkResult, cell, of_rounds, tabulated
from benchmarks.runner.parameters import Devices, Microbatches, Rounds, Schedules, one_of
from benchmarks.runner.rounds import Progress, best, median, ratio, silent, take_turns, within
from gapless.errors import ConfigError
from gapless.stage.intra_op import intra_op_threads
from gapless.units import show_count

_SIZES = {"light": (256, 64), "heavy": (1024, 2)}  # width, and samples in a microbatch
_NAMES = {"parts": "copies", "whole": "plain", "fsdp fsdp2": "fsdp2"}


def run(
    *,
    devices: Devices = 2,
    microbatches: Microbatches = 16,
    layers: Annotated[int, "linear layers of a device"] = 4,
    schedules: Schedules = ("1f1b", "zb-h1"),
    sizes: Annotated[tuple[str, ...], "which sizes: light, heavy", one_of("size", *_SIZES)] = tuple(_SIZES),
    rounds: Rounds = 7,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The step of each way, the quickest first, and for each size our best against torch's best, by the medians."""
    if layers % 2:
        raise ConfigError(
            f"{show_count(layers, 'layer')} can't be cut into 2 stages for each device: choose an even number"
        )
    reason = "it is not run here, since it must be started by its own launcher"
    skipped = {"deepspeed": reason if find_spec("deepspeed") else "DeepSpeed is not installed", **missing_torchgpipe()}
    sides: dict[SideName, tuple[str, ...]] = {"parts": ("parts", "whole"), "gapless": tuple(schedules), "torch": ALL}
    sides["fsdp"] = ("fsdp2",)
    if "torchgpipe" not in skipped:
        sides["torchgpipe"] = ("gpipe",)
    rows, figures, verdict = [], [], list[str]()
    for size in sizes:
        width, samples = _SIZES[size]
        contest = Contest(devices, microbatches, "linear", size=width, samples=samples, layers=layers)
        at = within(progress, size)
        with intra_op_threads(1), Lineup(contest, at) as lineup:
            lineup.add_here(schedules, "gapless, one process", on_all_cores=True)
            for side, names in sides.items():
                lineup.add_ranks(side, names, {"parts": "", "gapless": "gapless, ranks"}.get(side))
            ways = {_NAMES.get(name, name): way for name, way in lineup.contestants.items()}
            seconds = take_turns(ways, rounds, at)
        skipped |= {f"{_NAMES.get(name, name)}, {size}": why for name, why in lineup.refused.items()}
        verdict += [f"{size}: {told}." for told in best(seconds)["verdict"]]
        for way, taken in sorted(seconds.items(), key=lambda pair: median(pair[1])):
            between = " to ".join(cell(end(taken), "ms.2") for end in (min, max))
            row = {"size": size, "way": way, "rounds": taken, "of_limit": ratio(seconds["copies"], taken)}
            rows.append({**row, "between": between})
            figures.append(of_rounds(f"{size}: {way}", taken, by="gapless" if "gapless" in way else "other"))
    note = " ".join([*verdict, *(f"{name}: {why}." for name, why in skipped.items())])
    ranks, parts = show_count(devices, "rank"), show_count(microbatches, "microbatch")
    title = f"Every way to train on {ranks}, {parts}, quickest first"
    columns = "size | way | step=rounds:ms.2 | rounds=between | of the limit=of_limit:%.0"
    table = tabulated(title, rows, columns, note=note, left=2, in_docs=True)
    return BenchmarkResult({"rows": rows, "skipped": skipped}, figures, [table])
