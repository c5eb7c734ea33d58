"""GPipe's first table: the largest model that devices of one size can train, in several ways.

    plain              the whole minibatch at once, everything kept
    remat              the same, but every layer is computed again in the backward
    remat, M parts     microbatches too, on one device
    K devices          a pipeline of microbatches, recomputed where that is needed

First for the models and devices of the paper, by prediction: layers are counted without data, and the planner says what
fits. A minibatch is the largest power of two with which the paper's plain model fits here, where numbers have 32 bits.
Then with small models on this machine, where the bytes of a step are measured in each way: those of all tensors that
the actions of a device have made and that are there at the same time (on a GPU: what its allocator has given out).

example: python -m benchmarks largest --no-measured
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import nn

from benchmarks.gpipe import PUBLISHED
from benchmarks.gpipe.giants import amoebanet_profile, greatest, transformer_profile
from benchmarks.planner.prediction import peaks_of
from benchmarks.planner.subjects import Subject, planned, small_amoebanet, small_gpt
from benchmarks.runner.findings import BenchmarkResult, Figure, Found, tabulated
from benchmarks.runner.parameters import one_of
from benchmarks.runner.rounds import Progress, silent
from gapless import Pipeline
from gapless.errors import ConfigError
from gapless.plan.cut.partition import balanced
from gapless.plan.plan import Plan, Remat
from gapless.plan.profile.profile import Profile
from gapless.run.held_memory import in_use

_WAYS = (("plain", 1), ("remat", 1), ("remat, M parts", 1), ("2 devices", 2), ("4 devices", 4), ("8 devices", 8))

_MODELS: dict[str, Any] = PUBLISHED["largest"]


def run(
    *,
    models: Annotated[tuple[str, ...], "which models", one_of("model", *_MODELS)] = ("AmoebaNet-D", "Transformer"),
    measured: Annotated[bool, "leave out what is measured, and only predict"] = True,
    predicted: Annotated[bool, "leave out the sizes of the paper, and only measure"] = True,
    width: Annotated[int, "of the measured Transformer, and 4 times the filters of the AmoebaNet: 16, 32, ..."] = 64,
    layers: Annotated[int, "layers of the measured models, a multiple of 3"] = 6,
    devices: Annotated[int, "measure up to so many devices"] = 8,
    gpu: Annotated[bool, "measure on an NVIDIA GPU, one device"] = False,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The paper's sizes, and how much larger a model each way takes than the plain one; then what was measured, and how
    far predicted bytes are off.
    """
    if measured and (layers % 3 or width % 16):
        raise ConfigError(
            f"models of {layers} layers and width {width} can't be measured: give a multiple of 3 layers, and a width "
            "that is a multiple of 16"
        )
    if gpu and not torch.cuda.is_available():
        raise ConfigError("--gpu measures on an NVIDIA GPU, and there is none here: leave it out")
    place, rows = torch.device("cuda" if gpu else "cpu"), []
    for name in models if measured else ():
        torch.manual_seed(0)
        if name == "AmoebaNet-D":
            subject = small_amoebanet(cells=layers, filters=width // 4, side=64, samples=1)
        else:
            subject = small_gpt(width=width, depth=layers, vocab=256, length=64, samples=1)
        rows += _measured(subject, 1 if gpu else devices, place, progress)
    published = _published(models, progress) if predicted else []
    plain = {row["model"]: row["parameters"] for row in published if row["way"] == "plain"}
    figures = [
        Figure(f"{row['model']}, {row['way']}: larger than plain by", row["parameters"] / plain[row["model"]], "x")
        for row in published
        if row["way"] != "plain"
    ]
    off = ": predicted to measured bytes"
    figures += [Figure(f"{row['model']}, {row['way']}{off}", row["off"], "difference") for row in rows]
    note = "Predicted, float32 with Adam: 16 bytes for each parameter (the paper has 12). fullest: what the fullest "
    note += "device holds of the published model in this way. Nothing is offloaded to the host."
    columns = "model | way | minibatch | largest | parameters=count | published=size | parameters=their_count"
    columns += " | fullest=their_fullest:GiB | of=their_memory:GiB | =fits"
    tables = [tabulated("The largest model, by prediction", published, columns, note=note, left=2, in_docs=True)]
    note = f"The fullest device, a minibatch of {_MINIBATCH}: bytes that come and go in a step, weights aside."
    columns = "model | way | measured=held:MiB | predicted:MiB | =off:+%"
    tables.append(tabulated("What a step holds, measured", rows, columns, note=note, left=2, in_docs=True))
    return BenchmarkResult({"published": published, "rows": rows}, figures, [table for table in tables if table.rows])


# -- the sizes of the paper --------------------------------------------------------------------------------------------


def _published(models: Sequence[str], progress: Progress) -> list[Found]:
    rows: list[Found] = []
    for name in filter(models.__contains__, _MODELS):
        memory, minibatch, theirs = _MODELS[name]["memory"] * 2**30, _MODELS[name]["minibatch"], _MODELS[name]["ways"]
        size = theirs["plain"]["size"]
        while minibatch > 1 and _fullest(_giant(*size), "plain", 1, minibatch) > memory:
            minibatch //= 2  # the largest with which the published plain model fits
        for way, devices in _WAYS:
            progress(f"{name}, {way}")
            size = theirs.get(way, {"size": size})["size"]
            depth = _largest(size[1:], way, devices, minibatch, memory)
            own = sum(layer.gradients for layer in _giant(depth, *size[1:]).layers) // 4 if depth else 0
            row = {"model": name, "way": way, "minibatch": minibatch, "memory": memory, "layers": depth}
            row |= {"parameters": own, "largest": _size([depth, *size[1:]]), "count": _count(own)}
            if way in theirs:
                fullest, count = _fullest(_giant(*size), way, devices, minibatch), theirs[way]["parameters"]
                row |= {"published_size": size, "their_fullest": fullest, "their_memory": memory}
                row |= {"size": _size(size), "their_count": _count(count), "published_parameters": count}
                row["fits"] = "fits" if fullest <= memory else "too large"
            rows.append(row)
    return rows


def _giant(depth: int, *filters: int) -> Profile:
    """The layers of an AmoebaNet-D, or without filters of a Transformer, for one sample."""
    return amoebanet_profile(depth, filters[0], 1) if filters else transformer_profile(depth, 1)


def _largest(filters: Sequence[int], way: str, devices: int, minibatch: int, memory: int) -> int:
    """The greatest depth that fits, or 0."""

    def depth(number: int) -> int:
        return 3 * (number + 2) if filters else number  # an AmoebaNet begins with 9 cells

    def fits(number: int) -> bool:
        profile = _giant(depth(number), *filters)  # a deeper one has a layer for each device
        return len(profile.layers) < devices or _fullest(profile, way, devices, minibatch) <= memory

    found = greatest(fits)
    return depth(found) if found else 0


def _fullest(profile: Profile, way: str, devices: int, minibatch: int) -> int:
    return max(each.total for each in _plan(profile, way, devices, minibatch).memory)


def _plan(profile: Profile, way: str, devices: int, minibatch: int) -> Plan:
    """Of this way, whatever it holds, cut so that memory is shared out evenly. A pipeline recomputes stages, as the
    paper's does; on one device with one microbatch nothing is gained by that, so layers are recomputed one by one.
    """
    parts = 1 if way in ("plain", "remat") else min(32, minibatch)
    part = profile.scaled(minibatch // parts)
    kept = [layer.parameters + layer.gradients + layer.optimizer_state + layer.activation for layer in part.layers]
    mode: Remat = "none" if way == "plain" else "layer" if way == "remat" else "stage"
    return planned(part, devices, "gpipe", parts, mode, balanced(kept, devices))


# -- measured ----------------------------------------------------------------------------------------------------------

_MINIBATCH = 8
_SECONDS = 1.0  # of timing layers: a device that is quicker than the next one holds messages that nobody has taken yet


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
        row = {"model": subject.name, "way": way, "devices": count, "held": held, "predicted": predicted}
        rows.append({**row, "off": predicted / held - 1})
    return rows


def _on_gpu(subject: Subject, plan: Plan, place: torch.device) -> int:
    """What a step takes beyond what is there between steps."""
    inputs, target = (each.to(place) for each in subject.batch(plan.minibatch))
    layers = [copy.deepcopy(layer).to(place) for layer in subject.layers]
    with Pipeline(nn.Sequential(*layers), devices=[place], schedule=plan, loss=subject.loss) as pipe:
        pipe.step(inputs, target)
        torch.cuda.synchronize()
        before, _ = in_use(place)
        torch.cuda.reset_peak_memory_stats()
        pipe.step(inputs, target)
        torch.cuda.synchronize()
        return in_use(place)[1] - before


def _size(size: Sequence[int]) -> str:
    if not size[0]:
        return "none"
    return f"{tuple(size)}" if len(size) == 2 else f"{size[0]} layers"


def _count(number: float) -> str:
    factor, unit = (1e9, "B") if number >= 1e9 else (1e6, "M") if number >= 1e6 else (1e3, "k")
    return f"{number / factor:.3g}{unit}" if number else "-"
