"""Profiles that tests plan with: small, and shaped like models that are known."""

import random
from collections.abc import Sequence

from gapless.plan.profile.profile import Layer, Link, Profile, Seconds

MIB = 2**20
GIGABIT_10 = Link("ethernet", None, 0.0, 1.25e9)


def layer(
    seconds: float = 1e-3, parameters: int = MIB, activation: int = MIB, boundary: int = MIB, name: str = "layer"
) -> Layer:
    """F, I and W take a third of `seconds` each."""
    third = Seconds(seconds / 3)
    return Layer(
        name=name,
        forward=third,
        input_grad=third,
        weight_grad=third,
        recompute=third,
        parameters=parameters,
        gradients=parameters,
        optimizer_state=2 * parameters,
        activation=activation,
        kept_for_weight_grad=activation,
        boundary=boundary,
    )


def profile(layers: Sequence[Layer], links: Sequence[Link] = (), samples: int = 1) -> Profile:
    return Profile("test", tuple(layers), tuple(links), samples=samples)


def even(num_layers: int = 16, links: Sequence[Link] = (), **more: float) -> Profile:
    return profile([layer(**more) for _ in range(num_layers)], links)  # type: ignore[arg-type]


def some(chance: random.Random, num_layers: int, links: Sequence[Link] = ()) -> Profile:
    """Layers of all sizes, in time, weights and boundaries."""
    return profile(
        [
            layer(
                chance.choice((1.0, 2.0, 3.0, 5.0)),
                chance.choice((0, 1, 2, 10, 40)) * MIB,
                MIB,
                chance.choice((1, 2, 8, 30)) * MIB,
            )
            for _ in range(num_layers)
        ],
        links,
    )


def vgg16(samples: int = 64, flops: float = 3e12) -> Profile:
    """Thirteen convolutions and three fully connected layers at 224 x 224, in 32 bits, by counting multiplications."""
    shapes = [(64, 224), (64, 224), (128, 112), (128, 112), *[(256, 56)] * 3, *[(512, 28)] * 3, *[(512, 14)] * 3]
    pooled = {1, 3, 6, 9, 12}
    layers, channels = [], 3
    for number, (width, side) in enumerate(shapes):
        weights = 9 * channels * width
        size = width * side * side // (4 if number in pooled else 1)
        work = 6 * weights * side * side * samples / flops
        layers.append(layer(work, 4 * weights, 4 * size * samples, 4 * size * samples, f"conv{number}"))
        channels = width
    inputs = 512 * 7 * 7
    for number, width in enumerate((4096, 4096, 1000)):
        weights = inputs * width
        work = 6 * weights * samples / flops
        layers.append(layer(work, 4 * weights, 4 * width * samples, 4 * width * samples, f"fc{number}"))
        inputs = width
    return Profile("VGG-16", tuple(layers), samples=samples)


def lstm(num_layers: int = 8, width: int = 2048, samples: int = 64, length: int = 50) -> Profile:
    """Equal recurrent layers with many weights and small outputs, as in translation and language models."""
    weights = 8 * width * width
    work = 6 * weights * samples * length / 6e12
    size = 4 * width * samples * length
    return profile([layer(work, 4 * weights, size, size, f"lstm{number}") for number in range(num_layers)], (), samples)
