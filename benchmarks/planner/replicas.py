"""PipeDream's planner, run: stages and replicas for a model like VGG, and what a minibatch takes against what it was
predicted to.

The first layers of VGG take nearly all of the time, and the last ones have nearly all of the weights. So the planner
gives the first ones many devices, each with every so many-th minibatch, and the last ones one, whose weights nobody
has to exchange:

    convolutions   ranks 0 to 6   every 7th minibatch each, and the mean of 7 gradients for each update
    the rest       rank 7         every minibatch

Layers are emulated: they take the time of the profile and no processor. Activations, weights and gradients are real, so
they are sent, exchanged and updated. All times are those of a real machine, divided by the same number; sizes and
bandwidth are divided too, so that the plan stays what it was.

example: python -m benchmarks replicas --devices 8 --milliseconds 50
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import streaming
from benchmarks.peer.peer import Lineup
from benchmarks.runner.findings import BenchmarkResult, cell, of_rounds, tabulated
from benchmarks.runner.parameters import Between, Rounds
from benchmarks.runner.rounds import Progress, median, silent, take_turns
from gapless import Pipeline
from gapless.plan.asynchronous.replicate import Replication, replicate
from gapless.plan.profile.profile import Layer, Link, Profile, Seconds
from gapless.zoo.emulated import Emulated

_SAMPLES, _FLOPS, _BANDWIDTH = 64, 3e12, 1.25e9  # of the machine whose times are divided
_AT_LEAST = 40  # minibatches in a round
_SMALLER = 10  # sizes are divided by this besides, for a processor that has to copy them all


def run(
    *,
    devices: Annotated[int, "devices, each a process"] = 8,
    milliseconds: Annotated[float, "predicted time of a minibatch", Between(1, 60_000)] = 50.0,
    rounds: Rounds = 5,
    progress: Progress = silent,
) -> BenchmarkResult:
    """The plan, and how long a minibatch was to take, and took, in the steady state."""
    profile, made = planned(devices, milliseconds / 1000)
    crossing = profile.layers[made.partition[0] - 1].boundary // 4  # floats, from the first stage to the next
    contest = Contest(devices, 1, "emulated", seconds=milliseconds / 1000, size=crossing)
    with Lineup(contest, progress) as lineup:
        lineup.add_ranks("replicas", [str(made)])
        (taken,) = take_turns(lineup.contestants, rounds, progress, needed=True).values()
    seconds = [each / measured_minibatches(made) for each in taken]
    rows = []
    for number, (layers, count) in enumerate(zip(made.partition, made.replicas, strict=True)):
        each = f"every {count}." if count > 1 else "every one"
        rows.append({"stage": number, "layers": layers, "replicas": count, "each": each})
    off = [each / made.seconds - 1 for each in seconds]
    title = f"VGG-16 on {devices} emulated devices, a process each, as {made}; medians of {rounds}"
    took, predicted, more = cell(seconds, "ms"), cell(made.seconds, "ms"), cell(off, "%")
    verdict = f"a minibatch takes {took}, predicted {predicted}: {more} more"
    figure = of_rounds(f"measured to predicted minibatch, {made}", off, "difference", "less", "at most +10%")
    table = tabulated(title, rows, "stage | layers | replicas | minibatches of each=each", verdict)
    plan = {"plan": str(made), "partition": list(made.partition), "replicas": list(made.replicas)}
    found = {"predicted": made.seconds, "seconds": median(seconds), "ratio": median(off) + 1, "rounds": seconds}
    return BenchmarkResult({**plan, **found}, [figure], [table])


def planned(devices: int, seconds: float) -> tuple[Profile, Replication]:
    """A profile in which a minibatch takes so many seconds on so many devices, and its stages and replicas; the same on
    every rank.
    """
    slow = replicate(vgg16(), devices).seconds
    profile = vgg16(slow / seconds)
    return profile, replicate(profile, devices)


def vgg16(faster: float = 1.0) -> Profile:
    """Five blocks of convolutions, each up to its pooling, and three fully connected layers, at 224 x 224 and in 32
    bits, by counting multiplications; on a machine that is so much faster, with so much less to send.
    """
    layers, channels, side = [], 3, 224
    for number, (width, convolutions) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        weights = 9 * width * (channels + (convolutions - 1) * width)
        layers.append(_layer(f"block{number}", weights, weights * side * side, width * (side // 2) ** 2, faster))
        channels, side = width, side // 2
    inputs = channels * side * side
    for number, width in enumerate((4096, 4096, 1000)):
        layers.append(_layer(f"fc{number}", inputs * width, inputs * width, width, faster))
        inputs = width
    return Profile("VGG-16", tuple(layers), (Link("ethernet", None, 0.0, _BANDWIDTH / _SMALLER),), samples=_SAMPLES)


def _layer(name: str, weights: int, multiplications: int, outputs: int, faster: float) -> Layer:
    third = Seconds(2 * multiplications * _SAMPLES / _FLOPS / faster)
    size, returned = (4 * int(each / (_SMALLER * faster)) for each in (weights, outputs * _SAMPLES))
    times: Any = dict.fromkeys(("forward", "input_grad", "weight_grad", "recompute"), third)
    return Layer(name=name, **times, parameters=size, gradients=size, activation=returned, boundary=returned)


def measured_minibatches(found: Replication) -> int:
    """A whole number of groups of every stage, and at least so many minibatches."""
    group = math.lcm(*found.replicas)
    return -(-_AT_LEAST // group) * group


def prepare_replicas(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """What a rank runs: it goes on with a stream until devices are busy, and then for a while, which is the span. All
    layers hand on what crosses between the first two stages.
    """
    torch.manual_seed(0)  # every rank makes the same weights
    profile, made = planned(contest.devices, contest.seconds)
    layers = []
    for each in profile.layers:
        times = {name: getattr(each, name).median for name in ("forward", "input_grad", "weight_grad")}
        layers.append(Emulated(**times, size=contest.size, weights=each.parameters // 4))
    mesh = init_device_mesh("cpu", (contest.devices,), mesh_dim_names=("pp",))
    pipe = Pipeline(layers, mesh=mesh, schedule=made, loss=contest.loss)
    batch = torch.zeros(1, contest.size, requires_grad=True), torch.zeros(1)
    first = 4 * max(made.replicas) + made.num_devices
    return pipe.schedule.text(), streaming(pipe, batch, first, measured_minibatches(made))
