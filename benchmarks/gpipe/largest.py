"""GPipe's first table: the largest model that devices of one size can train, in several ways.

    plain              the whole minibatch at once, everything kept
    remat              the same, but every layer is computed again in the backward
    remat, M parts     microbatches too, on one device
    K devices          a pipeline of microbatches, recomputed where that is needed

First for the models and devices of the paper, by prediction: layers are counted without data, and the planner says what
fits. A minibatch is the largest power of two with which the paper's plain model fits here, where numbers have 32 bits.
Then with small models on this machine, where the bytes of a step are measured in each way: those of all tensors that
the actions of a device have made and that are there at the same time (on a GPU: what its allocator has given out).
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks.gpipe import published
from benchmarks.gpipe.giants import amoebanet_profile, transformer_profile
from benchmarks.gpipe.published import GIB, PublishedSize
from benchmarks.planner.prediction import peaks_of
from benchmarks.planner.subjects import Subject, small_amoebanet, small_gpt
from benchmarks.runner.outcome import Figure, Grid
from benchmarks.runner.report import mebibytes, signed, tabular
from benchmarks.runner.rounds import Progress, silent
from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.cut.partition import balanced
from gapless.plan.plan import Plan, Remat
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Drafts
from gapless.plan.search.finish import finished

_WAYS = (("plain", 1), ("remat", 1), ("remat, M parts", 1), ("2 devices", 2), ("4 devices", 4), ("8 devices", 8))
_MOST = 4096  # layers


@dataclass(frozen=True)
class _Giant:
    """A model whose depth is free: `profile` has its layers for one sample, `step` is by how much depths differ."""

    name: str
    profile: Callable[[int], Profile]
    step: int
    memory: int
    minibatch: int


def run(
    *,
    models: Annotated[tuple[str, ...], "which models"] = ("AmoebaNet-D", "Transformer"),
    measured: Annotated[bool, "leave out what is measured, and only predict"] = True,
    predicted: Annotated[bool, "leave out the sizes of the paper, and only measure"] = True,
    width: Annotated[int, "of the measured Transformer, and 4 times the filters of the AmoebaNet: 16, 32, ..."] = 64,
    layers: Annotated[int, "layers of the measured models, a multiple of 3"] = 6,
    devices: Annotated[int, "measure up to so many devices"] = 8,
    gpu: Annotated[bool, "measure on an NVIDIA GPU, one device"] = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Rows by model and way."""
    if wrong := [name for name in models if name not in ("AmoebaNet-D", "Transformer")]:
        raise ConfigError(f"there is no model {wrong[0][:40]!r} here: it is AmoebaNet-D or Transformer")
    if measured and (layers % 3 or width % 16):
        raise ConfigError(
            f"models of {layers} layers and width {width} can't be measured: give a multiple of 3 layers, and a width "
            "that is a multiple of 16"
        )
    if gpu and not torch.cuda.is_available():
        raise ConfigError("--gpu measures on an NVIDIA GPU, and there is none here: leave it out")
    place = torch.device("cuda" if gpu else "cpu")
    rows = []
    for name in models if measured else ():
        torch.manual_seed(0)
        rows += _measured(_subject(name, layers, width), 1 if gpu else devices, place, progress)
    found = {"published": _published(models, progress) if predicted else [], "rows": rows}
    progress("")
    return found


# -- the sizes of the paper --------------------------------------------------------------------------------------------


def _published(models: Sequence[str], progress: Progress) -> list[dict[str, Any]]:
    rows = []
    for name, columns, memory, most in (
        ("AmoebaNet-D", published.AMOEBANET, published.AMOEBANET_DEVICE, published.AMOEBANET_BATCH),
        ("Transformer", published.TRANSFORMER, published.TRANSFORMER_DEVICE, published.TRANSFORMER_BATCH),
    ):
        if name not in models:
            continue
        minibatch = _minibatch(name, columns[0], memory, most)
        theirs: dict[str, PublishedSize] = {}
        for each in columns:
            theirs[_WAYS[0][0] if each.devices is None else _way(each.devices)] = each
        last = columns[0]
        for way, devices in _WAYS:
            column = theirs.get(way)
            last = column or last
            filters = last.size[1] if name == "AmoebaNet-D" else 0
            progress(f"{name}, {way}")
            giant = _giant(name, filters, memory, minibatch)
            depth = _largest(giant, way, devices)
            row = {
                "model": name, "way": way, "filters": filters, "minibatch": minibatch, "memory": memory,
                "layers": depth, "parameters": _parameters(giant.profile(depth)) if depth else 0,
                "published_size": list(column.size) if column else None,
                "published_parameters": column.parameters if column else None,
            }  # fmt: skip
            if column is not None:
                row["their_fullest"] = _fullest(giant.profile(column.size[0]), way, devices, minibatch)
            rows.append(row)
    return rows


def _way(devices: int) -> str:
    return "remat, M parts" if devices == 1 else f"{devices} devices"


def _giant(name: str, filters: int, memory: int, minibatch: int) -> _Giant:
    if name == "AmoebaNet-D":
        return _Giant(name, lambda cells: amoebanet_profile(cells, filters, 1), 3, memory, minibatch)
    return _Giant(name, lambda layers: transformer_profile(layers, 1), 1, memory, minibatch)


def _minibatch(name: str, plain: PublishedSize, memory: int, most: int) -> int:
    """The largest with which the published plain model fits."""
    profile = _giant(name, plain.size[-1], memory, most).profile(plain.size[0])
    while most > 1 and _fullest(profile, "plain", 1, most) > memory:
        most //= 2
    return most


def _parameters(profile: Profile) -> int:
    return sum(layer.gradients for layer in profile.layers) // 4


def _largest(giant: _Giant, way: str, devices: int) -> int:
    """The greatest depth that fits, or 0."""
    low, high = 0, 1
    while high * giant.step <= _MOST and _fits(giant, _depth(giant, high), way, devices):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(giant, _depth(giant, middle), way, devices) else (low, middle)
    return _depth(giant, low) if low else 0


def _depth(giant: _Giant, number: int) -> int:
    return (number + 2) * giant.step if giant.step == 3 else number  # an AmoebaNet begins with 9 cells


def _fits(giant: _Giant, depth: int, way: str, devices: int) -> bool:
    profile = giant.profile(depth)
    if len(profile.layers) < devices:
        return True  # a deeper one has a layer for each device
    return _fullest(profile, way, devices, giant.minibatch) <= giant.memory


def _fullest(profile: Profile, way: str, devices: int, minibatch: int) -> int:
    return max(each.total for each in _plan(profile, way, devices, minibatch).memory)


def _plan(profile: Profile, way: str, devices: int, minibatch: int) -> Plan:
    """Of this way, whatever it holds, cut so that memory is shared out evenly. A pipeline recomputes stages, as the
    paper's does; on one device with one microbatch nothing is gained by that, so layers are recomputed one by one.
    """
    parts = 1 if way in ("plain", "remat") else _parts(minibatch)
    part = profile.scaled(minibatch // parts)
    drafts = Drafts(part, [Device()] * devices)
    choice = Choice("gpipe", 1, Mesh(1, devices), parts, minibatch // parts)
    mode: Remat = "none" if way == "plain" else "layer" if way == "remat" else "stage"
    kept = [layer.parameters + layer.gradients + layer.optimizer_state + layer.activation for layer in part.layers]
    return finished(drafts, drafts.make(choice, balanced(kept, devices), (mode,) * devices))


def _parts(minibatch: int) -> int:
    return min(32, minibatch)


# -- measured ----------------------------------------------------------------------------------------------------------

_MINIBATCH = 8
_SECONDS = 1.0  # of timing layers: a device that is quicker than the next one holds messages that nobody has taken yet


def _subject(name: str, layers: int, width: int) -> Subject:
    if name == "AmoebaNet-D":
        return small_amoebanet(cells=layers, filters=width // 4, side=64, samples=1)
    return small_gpt(width=width, depth=layers, vocab=256, length=64, samples=1)


def _measured(subject: Subject, devices: int, place: torch.device, progress: Progress) -> list[dict[str, Any]]:
    """A row for each way: what comes and goes in a step on the fullest device, as predicted from layers one by one, and
    as measured in the step.
    """
    progress(f"{subject.name}, layer by layer")
    profile = replace(subject.profile(str(place), devices, _SECONDS), slack=0.0)
    rows = []
    for way, count in _WAYS:
        if count > min(devices, len(profile.layers)):
            continue
        progress(f"{subject.name}, {way}")
        plan = _plan(profile, way, count, _MINIBATCH)
        held = _on_gpu(subject, plan, place) if place.type == "cuda" else max(peaks_of(subject, plan))
        predicted = max(each.activations + each.buffers + each.workspace for each in plan.memory)
        rows.append({"model": subject.name, "way": way, "devices": count, "held": held, "predicted": predicted})
    return rows


def _on_gpu(subject: Subject, plan: Plan, place: torch.device) -> int:
    """What a step takes beyond what is there between steps."""
    inputs, target = (each.to(place) for each in subject.batch(plan.minibatch))
    layers = [copy.deepcopy(layer).to(place) for layer in subject.layers]
    with Pipeline(nn.Sequential(*layers), devices=[place], schedule=plan, loss=subject.loss) as pipe:
        pipe.step(inputs, target)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        pipe.step(inputs, target)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


# -- told --------------------------------------------------------------------------------------------------------------


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """How much larger a model each way takes than the plain one, and how far predicted bytes are off."""
    plain = {row["model"]: row["parameters"] for row in found["published"] if row["way"] == "plain"}
    shown = [
        Figure(f"{row['model']}, {row['way']}: larger than plain by", row["parameters"] / plain[row["model"]], "x")
        for row in found["published"]
        if row["way"] != "plain"
    ]
    for row in found["rows"]:
        off = row["predicted"] / row["held"] - 1
        shown.append(Figure(f"{row['model']}, {row['way']}: predicted to measured bytes", off, "difference"))
    return shown


def tables(found: Mapping[str, Any]) -> list[Grid]:
    """The paper's sizes, then what was measured."""
    grids = []
    if found["published"]:
        note = (
            "Predicted, float32 with Adam: 16 bytes for each parameter (the paper has 12). fullest: what the fullest "
            "device holds of the published model in this way. Nothing is offloaded to the host."
        )
        grids.append(Grid("The largest model, by prediction", _PUBLISHED, _published_cells(found), note))
    if found["rows"]:
        note = f"The fullest device, a minibatch of {_MINIBATCH}: bytes that come and go in a step, weights aside."
        grids.append(Grid("What a step holds, measured", _HEADINGS, _cells(found), note))
    return grids


_PUBLISHED = (
    "model", "way", "minibatch", "largest", "parameters", "published", "parameters", "fullest", "of", "",
)  # fmt: skip
_HEADINGS = ("model", "way", "measured", "predicted", "")


def _published_cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in found["published"]:
        size = f"({row['layers']}, {row['filters']})" if row["filters"] else f"{row['layers']} layers"
        theirs = ("", "", "", "", "")
        if row["published_size"]:
            shown = row["published_size"]
            theirs = (
                f"({shown[0]}, {shown[1]})" if len(shown) == 2 else f"{shown[0]} layers",
                _count(row["published_parameters"]),
                _gib(row["their_fullest"]),
                _gib(row["memory"]),
                "fits" if row["their_fullest"] <= row["memory"] else "too large",
            )
        ours = (size, _count(row["parameters"])) if row["layers"] else ("none", "-")
        rows.append((row["model"], row["way"], str(row["minibatch"]), *ours, *theirs))
    return rows


def _cells(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["model"],
            row["way"],
            *(mebibytes(row[key]) for key in ("held", "predicted")),
            signed(row["predicted"] / row["held"] - 1),
        )
        for row in found["rows"]
    ]


def _count(number: float) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:g}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def report(found: dict[str, Any]) -> str:
    """Both tables."""
    return "\n\n".join(tabular(grid.title, grid.headings, grid.rows, "", grid.note, left=2) for grid in tables(found))
