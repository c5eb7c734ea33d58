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
"""

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from torch import nn

from benchmarks.peer.contest import Contest
from benchmarks.peer.peer import Peer
from benchmarks.runner.outcome import Figure, of_rounds
from benchmarks.runner.parameters import Between, Rounds
from benchmarks.runner.report import milliseconds as in_ms
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Progress, Span, median, silent, take_turns
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.asynchronous.replicate import Replication, replicate
from gapless.plan.profile.profile import Layer, Link, Profile, Seconds
from gapless.view import text
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
) -> dict[str, Any]:
    """What was planned, and the predicted and the measured time of a minibatch in the steady state."""
    made = planned(devices, milliseconds / 1000)
    contest = Contest(devices, 1, "emulated", seconds=milliseconds / 1000, size=crossing(made))
    progress(f"starting {devices} ranks")
    with Peer(contest, ["replicas"], "replicas") as ranks:
        if ranks.refused:
            raise AssertionError(ranks.refused)
        seconds = take_turns({str(made.found): lambda: ranks.step("replicas")}, rounds, progress)[str(made.found)]
    measured = [each / measured_minibatches(made.found) for each in seconds]
    return {
        "plan": str(made.found),
        "partition": list(made.found.partition),
        "replicas": list(made.found.replicas),
        "predicted": made.found.seconds,
        "seconds": median(measured),
        "ratio": median(measured) / made.found.seconds,
        "rounds": measured,
    }


class PlannedVgg(NamedTuple):
    """A profile in which a minibatch takes as long as it was asked to, and its stages and replicas."""

    profile: Profile
    found: Replication


def planned(devices: int, seconds: float) -> PlannedVgg:
    """For so many devices, `seconds` for a minibatch; the same on every rank."""
    slow = replicate(vgg16(), devices).seconds
    profile = vgg16(slow / seconds)
    return PlannedVgg(profile, replicate(profile, devices))


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
    return Layer(
        name=name, forward=third, input_grad=third, weight_grad=third, recompute=third, parameters=size, gradients=size,
        activation=returned, boundary=returned,
    )  # fmt: skip


def measured_minibatches(found: Replication) -> int:
    """A whole number of groups of every stage, and at least so many minibatches."""
    group = math.lcm(*found.replicas)
    return -(-_AT_LEAST // group) * group


def stepping(made: PlannedVgg, pipe: Pipeline) -> Callable[[], Span]:
    """Goes on with a stream until devices are busy, and then for a while, which is the span."""
    inputs, target = torch.zeros(1, crossing(made), requires_grad=True), torch.zeros(1)
    results = pipe.stream(optimizer=_sgd, split=True).run(itertools.repeat((inputs, target)))

    def run() -> Span:
        for _ in range(4 * max(made.found.replicas) + made.found.num_devices):
            next(results)
        start = time.perf_counter()
        for _ in range(measured_minibatches(made.found)):
            next(results)
        return Span(start, time.perf_counter())

    return run


def crossing(made: PlannedVgg) -> int:
    """Floats that cross from the first stage to the next."""
    return made.profile.layers[made.found.partition[0] - 1].boundary // 4


def model(made: PlannedVgg) -> nn.Sequential:
    """All layers hand on what crosses between the first two stages."""
    return nn.Sequential(
        *(
            Emulated(
                forward=each.forward.median,
                input_grad=each.input_grad.median,
                weight_grad=each.weight_grad.median,
                size=crossing(made),
                weights=each.parameters // 4,
            )
            for each in made.profile.layers
        )
    )


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def report(found: dict[str, Any]) -> str:
    """The plan, and how long a minibatch was to take, and took."""
    stages = zip(found["partition"], found["replicas"], strict=True)
    rows = [
        (str(number), str(layers), str(replicas), f"every {replicas}." if replicas > 1 else "every one")
        for number, (layers, replicas) in enumerate(stages)
    ]
    return tabular(
        f"VGG-16 on {found['devices']} emulated devices, a process each, as {found['plan']}; medians of "
        f"{len(found['rounds'])}",
        ("stage", "layers", "replicas", "minibatches of each"),
        rows,
        "",
        f"a minibatch takes {in_ms(found['seconds'])}, predicted {in_ms(found['predicted'])}: "
        f"{text.percent(found['ratio'] - 1)} more",
    )


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """How far the prediction is off."""
    off = [seconds / found["predicted"] - 1 for seconds in found["rounds"]]
    return [of_rounds(f"measured to predicted minibatch, {found['plan']}", off, "difference", "less", "at most +10%")]
