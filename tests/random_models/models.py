"""A model, what it is trained on and how, all from one number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import LENGTH, TRACEABLE, UNTRACED, VOCABULARY, WIDTH, Do, linear, table
from .habits import Clock, Habits, aliased, changes, used

# Of each the numbers of devices to choose from, and stages per device.
SCHEDULES: dict[str, tuple[tuple[int, ...], int]] = {
    "naive": ((1, 2, 3), 1),
    "gpipe": ((1, 2, 3), 1),
    "1f1b": ((1, 2, 3, 4), 1),
    "eager-1f1b": ((2, 3), 1),
    "interleaved": ((2,), 2),
    "looped-bfs": ((2,), 2),
    "zb-h1": ((2, 3, 4), 1),
    "zb-h2": ((2, 3), 1),
    "zb-v": ((2, 3), 2),
    "v-half": ((2, 3), 2),
    "v-min": ((2, 3), 2),
    "dualpipe-v": ((2,), 2),
    "auto": ((2, 3), 1),
}
STREAMS = ("pipedream", "2bw")


class Whole(nn.Module):
    """A model that is no sequence, so that it is traced."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def forward(self, *inputs: Any) -> Any:
        first, *others = self.parts
        value = first(*inputs)
        for part in others:
            value = part(value)
        return value


class Head(nn.Module):
    """A loss with a weight of its own, or one of the model's."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.weight = owner.weight

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.linear(outputs, self.weight), target)


@dataclass
class Trial:
    """One case."""

    seed: int
    names: list[str]
    layers: list[Any]
    model: Any
    traced: bool
    loss: Callable[[Any, Any], Tensor]
    weigh: str
    schedule: Any
    devices: int
    microbatches: int
    batches: list[tuple[Any, Any]]
    autocast: bool
    context: Callable[[], AbstractContextManager[Any]]  # what the user has around a forward
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    @property
    def streams(self) -> bool:
        return self.schedule in STREAMS

    def __str__(self) -> str:
        how = f"{self.schedule}, {self.devices} devices, M={self.microbatches}, {self.options}, {self.weigh}"
        return f"seed {self.seed}: {how}{', autocast' * self.autocast}{', traced' * self.traced}\n  {self.names}"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every one once, those of the loss too."""
        parts = [part for part in (*self.layers, self.loss) if isinstance(part, nn.Module)]
        return list(dict.fromkeys(p for part in parts for p in part.parameters()))

    @property
    def buffers(self) -> list[Tensor]:
        return [each for part in self.layers if isinstance(part, nn.Module) for each in part.buffers()]


def trial(seed: int, *, with_habits: bool = True) -> Trial:
    """The same one whenever it is called: a model for the pipeline, and another for the loop."""
    rng, more = random.Random(seed), random.Random(-seed)
    torch.manual_seed(seed)
    streams = with_habits and more.random() < 0.1
    traced = rng.random() < 0.08 and not streams
    autocast = not traced and rng.random() < 0.2 and not streams
    within = (autocast or rng.random() < 0.2) and not streams  # one that is switched off has its effects too
    schedule = rng.choice(list(SCHEDULES))
    devices, per_device = rng.choice(SCHEDULES[schedule][0]), SCHEDULES[schedule][1]
    if streams:
        schedule, devices, per_device = more.choice(STREAMS), more.randint(1, 3), 1
    stages = devices * per_device
    layers, names = _layers(rng, max(stages, rng.randint(3, 8)), traced, autocast)
    if (drawn := random.Random(f"table {seed}")).random() < 0.25:  # the seeds of once have the layers of once
        number = drawn.choice([at for at, layer in enumerate(layers) if not isinstance(layer, nn.Linear)] or [0])
        layers[number] = nn.Sequential(table(), layers[number])
        names[number] += " behind a table"
    habits = Habits(more, stream=streams) if with_habits and not traced else None
    if habits is not None:
        habits.put(more, layers, names)
    state = not traced and rng.random() < 0.4
    if state:
        layers, names = _on_states(rng, layers, names, with_habits=with_habits)
    inputs = rng.choice(["floats", "tokens", "two", "named"] if not traced else ["floats", "tokens", "two"])
    layers[0] = Do(_START[inputs, state], *_embedding(inputs), layers[0])
    if not streams:
        _share(rng, layers, names, inputs)
    last = Do(lambda part, value: part(value["h"] if isinstance(value, dict) else value), linear())
    layers.append(last)
    names.append("head")
    if not traced and not streams:
        _hook(rng, layers, names)
    if habits is not None:
        habits.use_elsewhere(more, layers, names)
    if rng.random() < 0.3:
        for parameter in rng.choice(layers[:-1]).parameters():
            parameter.requires_grad_(False)
            names.append("frozen")
    loss, weigh = (F.mse_loss, "mean") if streams else _loss(rng, layers, names, traced)
    if habits is not None:
        loss = habits.penalise(more, layers, names, loss)
    microbatches = rng.randint(max(2, devices), 6)
    if streams:
        microbatches = 1 if schedule == "pipedream" else devices
    cuts = sorted(rng.sample(range(1, len(layers)), stages - 1))
    options: dict[str, Any] = {"seed": rng.randint(0, 99)}
    if not traced:
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, len(layers)], strict=True)]
        options["partition"] = sizes
    if rng.random() < 0.5 and schedule != "auto":
        options["remat"] = [rng.choice(("none", "stage", "layer")) for _ in range(stages)]
    if not streams and random.Random(f"offload {seed}").random() < 0.25:
        options["offload"] = "activations"
        names.append("offload")
    samples = rng.choice([2 * microbatches, 2 * microbatches + 1, 3 * microbatches - 1, microbatches])
    if weigh == "counted":
        options["loss_weight"] = counted
    elif weigh == "sum":
        options["loss_weight"] = "sum"
    batches = [_batch(inputs, samples) for _ in range(6 if streams else 5 if habits else 2 if traced else 3)]
    if with_habits and not autocast and more.random() < 0.08 and not any("cast" in name for name in names):
        names.append("float64")
        for part in (*layers, loss):
            part.double() if isinstance(part, nn.Module) else None
        batches = [_doubled(batch) for batch in batches]
    return Trial(
        seed=seed,
        names=names,
        layers=layers,
        model=Whole(layers) if traced else nn.Sequential(*layers) if rng.random() < 0.7 else layers,
        traced=traced,
        loss=loss,
        weigh=weigh,
        schedule=schedule,
        devices=devices,
        microbatches=microbatches,
        batches=batches,
        autocast=autocast,
        context=partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast) if within else nullcontext,
        optimizer=_momentum if any("bfloat16" in name for name in names) else rng.choice((_momentum, _adamw)),
        options=options,
        clock=habits.clock if habits is not None else Clock(),
    )


def _doubled(tree: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda each: each.double() if each.is_floating_point() else each, tree)


def _momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _layers(rng: random.Random, count: int, traced: bool, autocast: bool) -> tuple[list[nn.Module], list[str]]:
    blocks = TRACEABLE if traced else {**TRACEABLE, **UNTRACED}
    names = [rng.choice(list(blocks)) for _ in range(count)]
    if autocast:
        names = ["conv" if name in ("recurrent",) else name for name in names]
    return [blocks[name]() for name in names], names


def _embedding(inputs: str) -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, WIDTH)] if inputs != "floats" else []


def _batch(inputs: str, samples: int) -> tuple[Any, Tensor]:
    x, ids = torch.randn(samples, LENGTH, WIDTH), torch.randint(VOCABULARY, (samples, LENGTH))
    value: Any = {"floats": x, "tokens": ids, "two": (x, ids), "named": {"x": x, "ids": ids}}[inputs]
    target = torch.randn(samples, LENGTH, WIDTH)
    return value, target


def _opened(h: Tensor) -> dict[str, Any]:
    return {"h": h, "skip": h, "note": "as it is", "nothing": None}


# How the first layer begins: (embedding, its own block, what comes in).
_START: dict[tuple[str, bool], Callable[..., Any]] = {
    ("floats", False): lambda part, x: part(x),
    ("tokens", False): lambda table, part, ids: part(table(ids)),
    ("two", False): lambda table, part, x, ids: part(x + table(ids)),
    ("named", False): lambda table, part, x, ids: part(x + table(ids)),
    ("floats", True): lambda part, x: part(_opened(x * 1)),
    ("tokens", True): lambda table, part, ids: part(_opened(table(ids))),
    ("two", True): lambda table, part, x, ids: part(_opened(x + table(ids))),
    ("named", True): lambda table, part, x, ids: part(_opened(x + table(ids))),
}


def _apply(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "h": part(state["h"])}


def _stash(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    h = part(state["h"])
    return {**state, "h": h, "skip": h}


def _use(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    mixed = state["skip"] * 0.5 + part(state["h"]) + state["h"] + torch.tanh(state["skip"])
    return {**state, "h": mixed * 0.5, "skip": state["skip"]}


def _views(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    h = part(state["h"])
    return {**state, "h": h.transpose(0, 1).contiguous().transpose(0, 1), "skip": h[..., :WIDTH]}


def _on_states(
    rng: random.Random, layers: list[nn.Module], names: list[str], *, with_habits: bool
) -> tuple[list[nn.Module], list[str]]:
    """Layers that hand on a dict, with the same tensor twice, skips and views."""
    ways: dict[str, Callable[..., Any]] = {"apply": _apply, "stash": _stash, "use": _use, "views": _views}
    if with_habits:
        ways = {**{name: used(way) for name, way in ways.items()}, "aliased": aliased, "changes": changes}
    chosen = [rng.choice(list(ways)) for _ in layers]
    made: list[nn.Module] = [Do(ways[way], layer) for way, layer in zip(chosen, layers, strict=True)]
    return made, [f"{name} ({way})" for name, way in zip(names, chosen, strict=True)]


def _linears(layers: Sequence[Any]) -> list[nn.Linear]:
    found = [module for layer in layers for module in layer.modules()]
    return [
        each for each in dict.fromkeys(found) if type(each) is nn.Linear and tuple(each.weight.shape) == (WIDTH,) * 2
    ]


def _share(rng: random.Random, layers: list[nn.Module], names: list[str], inputs: str) -> None:
    """The same layer in two places, or the same weight."""
    linears = _linears(layers)
    if rng.random() < 0.25 and len(linears) > 1:
        one, other = rng.sample(linears, 2)
        other.weight = one.weight
        names.append("tied")
    if rng.random() < 0.2 and len(layers) > 2:
        safe = [n for n in range(1, len(layers)) if not any(True for _ in layers[n].buffers())]
        if len(safe) > 1:
            source, target = rng.sample(safe, 2)
            layers[target] = layers[source]
            names.append(f"layer {target} is layer {source}")


def _halve(module: nn.Module, ins: Any, outs: Any) -> Any:
    return tuple(None if grad is None else grad * 0.5 for grad in ins)


def _hook(rng: random.Random, layers: list[nn.Module], names: list[str]) -> None:
    if rng.random() < 0.3:
        layer = rng.choice(_linears(layers) or [layers[-1]])
        kind = rng.choice(("forward", "before", "backward"))
        if kind == "forward":
            layer.register_forward_hook(lambda module, args, out: out * 1.25 if isinstance(out, Tensor) else out)
        elif kind == "before":
            layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.75,))
        else:  # torch refuses one whose output is changed in place
            layers[-1].register_full_backward_hook(_halve)
        names.append(f"{kind} hook")
    if rng.random() < 0.2:
        parameter = rng.choice(list(layers[-1].parameters()))
        parameter.register_hook(lambda grad: grad * 0.5)
        names.append("parameter hook")


def counted(target: Tensor) -> Tensor:
    """How many values of a target count."""
    return (target > 0).sum()


def _mean_counted(outputs: Tensor, target: Tensor) -> Tensor:
    keep = target > 0
    return ((outputs - target).square() * keep).sum() / keep.sum().clamp(min=1)


def _sum(outputs: Tensor, target: Tensor) -> Tensor:
    return 0.01 * F.mse_loss(outputs, target, reduction="sum")


def _loss(
    rng: random.Random, layers: list[nn.Module], names: list[str], traced: bool
) -> tuple[Callable[[Any, Any], Tensor], str]:
    kind = rng.choice(("mean", "mean", "counted", "sum", "penalty", "head", "tied head"))
    names.append(f"loss: {kind}")
    if kind == "counted":
        return _mean_counted, "counted"
    if kind == "sum":
        return _sum, "sum"
    if kind == "penalty":
        chosen = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))

        def penalised(outputs: Tensor, target: Tensor) -> Tensor:
            penalty = torch.stack([p.float().square().sum() for p in chosen]).sum()
            return F.mse_loss(outputs, target) + 0.01 * penalty

        return penalised, "mean"
    if kind in ("head", "tied head"):
        linears = _linears(layers)
        return Head(rng.choice(linears) if kind == "tied head" else linear()), "mean"
    return F.mse_loss, "mean"
