"""GPipe's first table once more: the largest GPT on devices of one size, with the host's memory too.

    plain        everything is kept
    remat        stages are recomputed where that is needed
    offload      activations wait in the host's memory where that is needed, and nobody waits for them
    both         the planner chooses for each stage
    optimizer    the same, and the optimizer's state is in the host's memory

All as a pipeline under 1f1b or interleaved. By prediction: layers are counted without data, and the planner says what
fits, and how long a step takes. With --gpu it is measured too: as many ranks as devices share an NVIDIA GPU, each may
allocate so much of its memory, and models from the predicted size on are trained for two steps, until the largest that
fits and the smallest that does not are known. Layers and the link to the host, which all ranks share, are measured
there first.

example: python -m benchmarks offload --gpu --devices 4 --width 1024 --samples 4 --memory 4
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpipe import giants
from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Peer
from benchmarks.runner.findings import BenchmarkResult, Figure, Found, tabulated
from benchmarks.runner.parameters import Between, Devices, Microbatches, check_width
from benchmarks.runner.rounds import Progress, silent
from gapless import Pipeline, offload_optimizer
from gapless.errors import ConfigError, PlanError
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.measure import measure
from gapless.plan.profile.profile import Host, Profile
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.units import show_count
from gapless.view.template import filled
from gapless.zoo.gpt import next_token_loss

_WAYS: Mapping[str, SearchOptions] = {
    "plain": SearchOptions(remat=()),
    "remat": SearchOptions(remat=("stage",)),
    "offload": SearchOptions(remat=(), offload="activations"),
    "both": SearchOptions(remat=("stage",), offload="activations"),
    "optimizer": SearchOptions(remat=("stage",), offload="both"),
}
_MORE = (1.0, 1.1, 1.25, 1.5, 2.0)  # times the memory that a model which does not fit is planned for
_STEP = 12  # a trial adds or leaves out one layer of so many
TOO_LARGE = "out of memory"
Planned = Callable[..., Plan | None]  # for a depth, and so many times the memory


def run(
    *,
    devices: Devices = 8,
    microbatches: Microbatches = 16,
    samples: Annotated[int, "in a microbatch"] = 1,
    width: Annotated[int, "of the GPT, a multiple of 64"] = 4096,
    tokens: Annotated[int, "in a sample"] = 1024,
    memory: Annotated[float, "GiB of each device", Between(0.1, 1000)] = 40.0,
    speed: Annotated[float, "TFLOP/s of a device, where nothing is measured", Between(0.001, 1e6)] = 19.5,
    bandwidth: Annotated[float, "GB/s to the host, where nothing is measured", Between(0.001, 1e6)] = 25.0,
    gpu: Annotated[bool, "measure on an NVIDIA GPU"] = False,
    minutes: Annotated[float, "with --gpu: start no trial after so many minutes", Between(0.1, 100)] = 3.0,
    picture: Annotated[Path | None, "draw the sizes as an SVG"] = None,
    progress: Progress = silent,
) -> BenchmarkResult:
    """A row for each way: the sizes, and how much larger than plain; with what was trained, where that was measured."""
    if gpu and not torch.cuda.is_available():
        raise ConfigError("--gpu measures on an NVIDIA GPU, and there is none here: leave it out")
    check_width(width, heads=width // 64 or 64)
    contest = Contest(devices, microbatches, "gpt", size=width, samples=samples, tokens=tokens)
    limit, started = int(memory * 2**30), time.monotonic()
    small = _measured(contest, progress) if gpu else _counted(contest, speed * 1e12, bandwidth * 1e9)
    common: Any = {"schedules": ("1f1b", "interleaved"), "microbatches": microbatches, "time_limit": 10.0}
    common["mesh"] = Mesh(1, devices)
    ways = {way: partial(_plan, small, contest, replace(each, **common), limit) for way, each in _WAYS.items()}
    rows: list[Found] = []
    for way, plan in ways.items():
        progress(f"{way}: planning")
        rows.append({"way": way, **_largest(small, plan, devices)})
        if gpu:
            until = started + 60 * minutes * len(rows) / len(_WAYS)
            rows[-1] |= _tried(plan, contest, rows[-1], limit, until, progress)
    same = (rows[0]["layers"] + rows[1]["layers"] + 1) // 2  # between what fits plain and with remat
    figures = []
    for row in rows:
        made = ways[row["way"]](same) if same else None
        row |= {"same": made and made.step_seconds, "trained": row.get("fits") or "-"}
        row |= {"failed": row.get("too_large") or "-", "larger": None}
        if rows[0]["parameters"]:
            row["larger"] = row["parameters"] / rows[0]["parameters"]
        if row["larger"] and row["way"] != "plain":
            figures.append(Figure(f"{row['way']}: larger than plain by", row["larger"], "x"))
    progress("")
    if picture is not None:
        picture.write_text(drawn(rows), encoding="utf-8", newline="\n")
    columns = "way | layers | parameters:B | against plain=larger:x | activations on the host=host:GiB | step=seconds:s"
    columns += f" | of {same} layers=same:s{' | trained | too large=failed' * gpu}"
    note = f"{show_count(devices, 'device')} of {memory:g} GiB, {microbatches} microbatches of {samples} samples with "
    note += f"{tokens} tokens, width {width}, float32 with AdamW. "
    if gpu:
        note += f"Layers and the link were measured on {torch.cuda.get_device_name()}, shared by all ranks."
    else:
        note += f"Predicted for {speed:g} TFLOP/s and {bandwidth:g} GB/s between a device and its host."
    failed = [f"{row['way']}: {row['reason']}" for row in rows if row.get("reason") not in (None, "", TOO_LARGE)]
    table = tabulated("The largest GPT", rows, columns, *failed, note=note, in_docs=True)
    return BenchmarkResult({"rows": rows, "same": same}, figures, [table])


def _counted(contest: Contest, speed: float, bandwidth: float) -> Profile:
    """A GPT of one block, without data; a device computes so many operations in a second."""
    with torch.device("meta"):
        layers = list(giants.transformer(1, contest.size, contest.tokens))
    ids = _ids(contest, 1)
    return replace(measure(layers, ids, ids, loss=next_token_loss, flops=speed), host=Host(bandwidth))


def _measured(contest: Contest, progress: Progress) -> Profile:
    """The same on a GPU, with what messages between ranks keep there. All ranks share the link to the host."""
    from gapless.run.ranks.wire.gpu_memory.slots import most_bytes
    from gapless.stage.offload.host_link import link_speed

    progress("measuring layers")
    place = torch.device("cuda", 0)
    ids, layers = _ids(contest, 1).to(place), list(giants.transformer(1, contest.size, contest.tokens))
    found = measure(layers, ids, ids, loss=next_token_loss, device=place, seconds=2.0)
    latency, bandwidth = link_speed(place)
    torch.cuda.empty_cache()
    kept = most_bytes(max(layer.boundary for layer in found.layers[:-1]))
    return replace(found, reserved=found.reserved + kept, host=Host(bandwidth / contest.devices, latency))


def _plan(small: Profile, contest: Contest, wanted: SearchOptions, memory: int, depth: int, more: float = 1.0) -> Any:
    """For so many blocks, and so many times the memory of a device; None if it does not fit."""
    machine = [Device(int(more * memory))] * contest.devices
    with contextlib.suppress(PlanError):
        return search(giants.deeper(small, depth), machine, wanted, contest.microbatches * contest.samples).best
    return None


def _largest(small: Profile, plan: Planned, devices: int) -> Found:
    """The greatest depth that fits, its parameters, step and bytes on the host of a device."""
    depth = giants.greatest(lambda depth: plan(depth) is not None, devices)
    if (made := plan(depth)) is None:
        return {"layers": 0, "parameters": 0}
    away = max(map(float, made.timeline.host_peak)) if made.schedule.has_copies else 0.0
    parameters = sum(layer.parameters // 4 for layer in giants.deeper(small, depth).layers)
    found = {"layers": depth, "parameters": parameters}
    return found | {"seconds": made.step_seconds, "throughput": made.throughput, "host": away}


def _tried(planned: Planned, contest: Contest, row: Found, memory: int, until: float, progress: Progress) -> Found:
    """From what is predicted on, one step at a time: the largest that was trained, and the smallest that was not."""
    each = max(1, row["layers"] // _STEP)
    found: Found = {"fits": None, "too_large": None, "reason": ""}
    depth = max(1, row["layers"])
    while time.monotonic() < until and depth > 0 and None in (found["fits"], found["too_large"]):
        plan = next(filter(None, (planned(depth, more) for more in _MORE)), None)
        if plan is None:
            break
        progress(f"{row['way']}: training {show_count(depth, 'layer')}")
        found["reason"] = trained(contest, depth, plan, memory)
        if found["reason"] not in ("", TOO_LARGE):
            break
        found["too_large" if found["reason"] else "fits"] = depth
        depth += -each if found["reason"] else each
    return found


def trained(contest: Contest, depth: int, plan: Plan, memory: int) -> str:
    """Why ranks with so much memory can't train it; empty where they can."""
    asked = json.dumps((depth, plan.to_json(), memory))
    with Peer(contest, [asked], "trial") as ranks:
        reason = ranks.refused.get(asked, "")
    return TOO_LARGE if TOO_LARGE in reason else reason[:300]


def _ids(contest: Contest, microbatches: int) -> torch.Tensor:
    """So many microbatches of tokens, the same always."""
    shape = (microbatches * contest.samples, contest.tokens)
    return torch.randint(giants.VOCABULARY, shape, generator=torch.Generator().manual_seed(0))


def prepare_trial(contest: Contest, name: str, rank: int) -> tuple[None, Callable[[], object]]:
    """Trains a GPT; the name has its depth, its plan, and the bytes that a rank may take, as JSON."""
    depth, plan, memory = json.loads(name)
    planned = Plan.from_json(plan)
    if contest.on_gpu:  # without one everything fits
        total = torch.cuda.get_device_properties(contest.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))
    mesh = init_device_mesh(contest.device.type, (contest.devices,), mesh_dim_names=("pp",))
    with torch.device("meta"):
        layers = giants.transformer(depth, contest.size, contest.tokens)
    ids = _ids(contest, contest.microbatches)
    more: Any = {"transport": "memory" if contest.on_gpu else "auto", "timeout": 90.0, "init": "reset_parameters"}
    pipe = Pipeline(layers, mesh=mesh, schedule=planned, loss=next_token_loss, **more)
    optimizer = torch.optim.AdamW([each for each in pipe.parameters() if each.numel()])
    if planned.offload_optimizer:
        offload_optimizer(optimizer)
    for _ in range(2):
        pipe.step(ids, ids)
        optimizer.step()
        optimizer.zero_grad()
    contest.settle()
    return None, lambda: None


_COLOURS = {"plain": "#8a8f98", "remat": "#d9822b", "offload": "#2b7bba", "both": "#3a9d5d", "optimizer": "#7a5bb5"}


def drawn(rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each way, as long as its model is deep; a mark where the largest one that was trained ends."""
    most = max(max(row["layers"], row.get("fits") or 0) for row in rows) or 1
    return filled("largest.svg", "benchmarks.gpipe", rows=rows, most=most, colours=_COLOURS)
