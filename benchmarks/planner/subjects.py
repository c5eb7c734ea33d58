"""What `python -m benchmarks plan` measures: models as layers, and how each is to be run."""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.runner.parameters import check_width
from benchmarks.runner.rounds import Contestant, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.plan import Plan, Remat
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.measure import hop, measure
from gapless.plan.profile.profile import Profile
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Drafts, Modes
from gapless.plan.search.finish import finished
from gapless.run.world import World
from gapless.schedule.recipes import find_recipe
from gapless.zoo.amoebanet import amoebanet
from gapless.zoo.emulated import Emulated
from gapless.zoo.gpt import gpt, next_token_loss
from gapless.zoo.resnet import resnet
from gapless.zoo.transformer import Transformer
from gapless.zoo.unet import UNet


@dataclass(frozen=True)
class Subject:
    """A model as layers, and the data of one microbatch after another."""

    name: str
    layers: Sequence[nn.Module]
    loss: Callable[[Any, Any], Tensor]
    data: Callable[[int, torch.Generator], tuple[Any, Any]]  # so many samples and their target
    samples: int = 1  # in a microbatch

    @property
    def emulated(self) -> bool:
        """Whether its layers sleep: they hold next to nothing, and their times don't drift."""
        return isinstance(self.layers[0], Emulated)

    def batch(self, count: int) -> tuple[Any, Any]:
        """So many samples and their target, the same ones always."""
        return self.data(count, torch.Generator().manual_seed(0))

    def profile(self, device: str, devices: int, seconds: float) -> Profile:
        """As measured, for so many devices, with the hop from one thread to another where there are several."""
        inputs, target = self.batch(self.samples)
        threads = max(1, torch.get_num_threads() // devices)
        more: Any = {"device": device, "threads": threads, "side_by_side": devices, "seconds": seconds}
        found = measure(self.layers, inputs, target, loss=self.loss, name=self.name, **more)
        return replace(found, links=(hop(),) if devices > 1 else ())

    def pipeline(self, plan: Plan, world: World | None = None) -> Pipeline:
        """Of copies of these layers, since several pipelines must not share them."""
        devices = world or ["cpu"] * plan.num_devices
        return Pipeline(copy.deepcopy(list(self.layers)), devices=devices, schedule=plan, loss=self.loss)

    def contestant(self, stack: ExitStack, plan: Plan, world: World | None = None) -> Contestant:
        """Runs steps of a plan, for as long as the stack is open."""
        pipe = stack.enter_context(self.pipeline(plan, world))
        return timed(partial(pipe.step, *self.batch(plan.minibatch)))


def planned(
    profile: Profile, devices: int, recipe: str, microbatches: int, remat: Remat = "none", partition: Any = None
) -> Plan:
    """The plan for just this schedule, whatever it holds; `partition` gives the cuts too."""
    drafts = Drafts(profile, [Device()] * devices)
    each = 1 if find_recipe(recipe).placement == "line" else 2  # stages of a device
    choice = Choice(recipe, each, Mesh(1, devices), microbatches, profile.samples)
    again: Modes = (remat,) * choice.placement.num_stages
    counts = drafts.cut(choice, again) if partition is None else tuple(partition)
    return finished(drafts, drafts.make(choice, counts, again))


COLUMNS = "model | schedule | K=devices | M=microbatches | remat"


def told(subject: Subject, plan: Plan) -> dict[str, Any]:
    """What was run, under these columns."""
    ran = {"schedule": plan.recipe, "devices": plan.num_devices, "microbatches": plan.microbatches}
    return {"model": subject.name, **ran, "remat": "yes" if "stage" in plan.remat else "-"}


# -- emulated -------------------------------------------------------------------------------------------------------


def emulated(name: str, milliseconds: Sequence[tuple[float, float, float]]) -> Subject:
    """Layers that take (F, I, W) milliseconds each, and no processor."""
    layers = [Emulated(forward=f / 1e3, input_grad=i / 1e3, weight_grad=w / 1e3) for f, i, w in milliseconds]

    def data(count: int, _: torch.Generator) -> tuple[Any, Any]:
        return torch.linspace(-1.0, 1.0, count).view(count, 1).requires_grad_(), torch.zeros(count, 1)

    return Subject(name, layers, lambda outputs, target: outputs.sum(), data)


# -- real -----------------------------------------------------------------------------------------------------------


def small_gpt(
    width: int = 96, depth: int = 4, vocab: int = 256, length: int = 48, samples: int = 2, heads: int = 4, **more: Any
) -> Subject:
    """Its embedding and head grow with the vocabulary, and unbalance it."""
    check_width(width, heads)

    def data(count: int, chance: torch.Generator) -> tuple[Any, Any]:
        ids = torch.randint(vocab, (count, length + 1), generator=chance)
        return ids[:, :-1], ids[:, 1:]

    model = gpt(vocab=vocab, width=width, depth=depth, heads=heads, context=length, **more)
    return Subject(f"gpt, vocabulary {vocab:,}", list(model), next_token_loss, data, samples)


def small_resnet(depth: int = 101, width: int = 8, side: int = 64, samples: int = 4) -> Subject:
    """Early layers hold large images, late ones many channels."""

    model = resnet(depth, classes=10, width=width)
    return Subject(f"resnet-{depth}", list(model), F.cross_entropy, partial(_images, side), samples)


def small_amoebanet(cells: int = 6, filters: int = 16, side: int = 32, samples: int = 2) -> Subject:
    """Pairs of tensors travel from cell to cell."""

    model = amoebanet(cells=cells, filters=filters, classes=10)
    name = f"AmoebaNet-D ({cells}, {filters})"
    return Subject(name, list(model), F.cross_entropy, partial(_images, side), samples)


def _images(side: int, count: int, chance: torch.Generator) -> tuple[Any, Any]:
    return torch.randn(count, 3, side, side, generator=chance), torch.randint(10, (count,), generator=chance)


class _Layer(nn.Module):
    """A function of the modules that it uses and of what the layer before returned."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.used = function, nn.ModuleList(modules)

    def forward(self, *value: Any) -> Any:
        return self.function(*self.used, *value)


def small_unet(depth: int = 3, width: int = 8, side: int = 64, samples: int = 2) -> Subject:
    """What one layer hands to the next grows on the way down: the skips travel along."""

    def data(count: int, chance: torch.Generator) -> tuple[Any, Any]:
        images = torch.randn(count, 3, side, side, generator=chance)
        return images, torch.randint(2, (count, side, side), generator=chance)

    model = UNet(depth=depth, width=width)
    layers = [
        _Layer(lambda convolve, image: (convolve(image),), model.enter),
        *(_Layer(_down, model.pool, down) for down in model.down),
        *(_Layer(_up, grow, up) for grow, up in zip(model.grow, model.up, strict=True)),
        _Layer(lambda head, value: head(value[0]), model.head),
    ]
    return Subject("u-net", layers, F.cross_entropy, data, samples)


def _down(pool: nn.Module, convolve: nn.Module, skips: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (*skips, convolve(pool(skips[-1])))


def _up(grow: nn.Module, convolve: nn.Module, value: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    *skips, skip, x = value
    return (*skips, convolve(torch.cat([skip, grow(x)], dim=1)))


def small_transformer(
    width: int = 96, depth: int = 4, vocab: int = 4000, length: int = 48, samples: int = 2
) -> Subject:
    """An encoder and a decoder: the memory and the mask travel along."""

    def data(count: int, chance: torch.Generator) -> tuple[Any, Any]:
        source = torch.randint(1, vocab, (count, length), generator=chance)
        ids = torch.randint(1, vocab, (count, length + 1), generator=chance)
        return (source, ids[:, :-1]), ids[:, 1:]

    model = Transformer(vocab=vocab, width=width, depth=depth, context=length)
    *encoder, last = model.encoder
    layers = [
        _Embed(model),
        *(_Layer(_encode, layer) for layer in encoder),
        _Layer(_encode, last, model.memory_norm),
        *(_Layer(_decode, layer) for layer in model.decoder),
        _Layer(lambda norm, head, value: head(norm(value[1])), model.norm, model.head),
    ]
    return Subject("encoder-decoder", layers, next_token_loss, data, samples)


class _Embed(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.embeddings, self.scale = nn.ModuleList([model.source_tokens, model.target_tokens]), model.scale
        self.register_buffer("positions", model.get_buffer("positions").clone())

    def forward(self, *both: Tensor) -> Any:
        places = self.get_buffer("positions")
        made = (e(ids) * self.scale + places[: ids.size(1)] for e, ids in zip(self.embeddings, both, strict=True))
        return (*made, (both[0] != 0)[:, None, None, :])


def _encode(layer: nn.Module, *rest: Any) -> Any:
    *norms, (x, y, there) = rest
    x = layer(x, there)
    for norm in norms:
        x = norm(x)
    return x, y, there


def _decode(layer: nn.Module, value: Any) -> Any:
    memory, y, there = value
    length = y.size(1)
    earlier = torch.ones(length, length, dtype=torch.bool, device=y.device).tril()
    return memory, layer(y, earlier, memory, there), there


def random_layers(count: int = 10, samples: int = 64, seed: int = 1) -> Subject:
    """Two-layer networks of all widths."""
    chance = random.Random(seed)
    width = 64
    layers = [
        nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
        for inner in (chance.choice((64, 256, 1024, 3072)) for _ in range(count))
    ]

    def data(count: int, chance: torch.Generator) -> tuple[Any, Any]:
        return torch.randn(count, width, generator=chance), torch.zeros(count, width)

    return Subject("random", layers, F.mse_loss, data, samples)
