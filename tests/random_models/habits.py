"""What people do in layers and losses that a pipeline may get wrong, and that one step does not show: state in
attributes, things that begin at a later step or that only some microbatches do, memory that is shared.
"""

from __future__ import annotations

import array
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import WIDTH, Do, Twice, linear, swapped


class Clock:
    """What the script counts: the step that comes."""

    step = 0


class Stateful(nn.Module):
    """State in plain attributes. A buffer keeps it from being used in two places, which would be a race."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(()))
        self.part, self.kind = linear(), kind
        self.count, self.mean, self.seen = 0, torch.zeros(WIDTH), list[float]()

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counter":
            self.count += 1
            return self.part(x) * (1 + self.count / 64)  # type: ignore[no-any-return]
        if self.kind == "average":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().to(self.mean).mean((0, 1))
        elif self.kind == "average in place":
            self.mean.mul_(0.9).add_(x.detach().to(self.mean).mean((0, 1)), alpha=0.1)
        else:
            self.seen.append(float(x.detach().mean()))
            return self.part(x) * (1 + sum(self.seen[-3:]) / 64)  # type: ignore[no-any-return]
        return self.part(x) - self.mean.to(x)  # type: ignore[no-any-return]


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> float:
        self.n += 1
        return self.n


def _add(held: Any) -> float:
    held[0] += 1
    return float(held[0])


class Ticks(nn.Module):
    """State behind other things than attributes. A buffer keeps it from being used in two places."""

    def __init__(self, tick: Callable[[], float]) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(()))
        self.part, self.tick = linear(), tick

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * (1 + self.tick() / 64)  # type: ignore[no-any-return]


class Loose(nn.Module):
    """A batch norm that nobody registered."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("nothing", torch.zeros(()))
        self.part, self.norms = linear(), [nn.BatchNorm1d(WIDTH, affine=False, momentum=None)]
        self.shift = lambda: self.norms[0].running_mean

    def forward(self, x: Tensor) -> Tensor:
        self.norms[0](x.detach().flatten(0, -2).to(torch.float32))
        moved = self.shift()  # type: ignore[no-untyped-call]
        assert moved is not None
        return self.part(x) + moved.to(x)  # type: ignore[no-any-return]


class Untied(nn.Linear):
    """Nobody shares its weight: a reentrant checkpoint adds to the gradient whenever it runs, and others have another
    type.
    """


def _checkpointed(kind: str, reentrant: bool) -> nn.Module:
    inner: dict[str, Callable[[], nn.Module]] = {
        "plain": nn.GELU,
        "dropout": lambda: nn.Dropout(0.2),
        "batch norm": lambda: swapped(nn.BatchNorm1d(WIDTH)),
    }
    ends = [Untied(WIDTH, WIDTH) if reentrant else linear() for _ in range(2)]
    part = nn.Sequential(ends[0], inner[kind](), ends[1])
    if reentrant:
        part.register_buffer("nothing", torch.zeros(()))
    return Do(lambda part, x: checkpoint(part, x, use_reentrant=reentrant), part)


def _twice(part: nn.Module, x: Tensor) -> Any:
    return Twice.apply(part(x), part.weight)  # type: ignore[no-untyped-call]


def _cast(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (part(x) + part(x * 0.5)).to(x.dtype)  # type: ignore[no-any-return]


def _forks(part: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.rand(WIDTH)
    return part(x) * noise + torch.rand(WIDTH)  # type: ignore[no-any-return]


def _along(part: nn.Module, x: Tensor) -> Tensor:
    made, slope = torch.func.jvp(part, (x,), (torch.ones_like(x),))
    return made + 0.1 * slope  # type: ignore[no-any-return]


def _in_low(part: nn.Linear, x: Tensor) -> Tensor:
    return part(x.to(part.weight.dtype)).to(x.dtype)  # type: ignore[no-any-return]


def _low_with_high_gradients() -> nn.Module:
    part = Untied(WIDTH, WIDTH).bfloat16()
    for each in part.parameters():
        if hasattr(each, "grad_dtype"):
            each.grad_dtype = torch.float32
    return Do(_in_low, part)


def _scaled_after(part: nn.Linear) -> nn.Linear:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.75)

    part.weight.register_post_accumulate_grad_hook(scale)
    return part


class Habits:
    """Those that one case has."""

    def __init__(self, rng: random.Random, *, stream: bool) -> None:
        self.clock = Clock()
        self.begins = rng.randint(1, 4)  # the step at which what is late begins
        self.generator = torch.Generator().manual_seed(rng.randint(0, 99))
        self.by_data: dict[str, Callable[[], nn.Module]] = {
            "counter in an attribute": lambda: Stateful("counter"),
            "average in an attribute": lambda: Stateful("average"),
            "average in place": lambda: Stateful("average in place"),
            "list in an attribute": lambda: Stateful("list"),
            "second use by the data": lambda: Do(
                lambda part, x: part(x) * part.weight.mean() if x.mean() > 0 else part(x), linear()
            ),
            "hidden use by the data": lambda: Do(
                lambda part, x: _twice(part, x) if x.mean() > 0 else part(x), linear()
            ),
            "no use by the data": lambda: Do(lambda part, x: part(x) if x.mean() > 0 else x * 0.5, linear()),
            "checkpoint": lambda: _checkpointed("plain", False),
            "checkpoint (reentrant)": lambda: _checkpointed("plain", True),
            "checkpoint with dropout": lambda: _checkpointed("dropout", False),
            "checkpoint with batch norm": lambda: _checkpointed("batch norm", False),
            "float32 gradients of bfloat16": _low_with_high_gradients,
        }
        # In the place of some of those in an attribute, so that the models of known seeds keep all others.
        self.elsewhere: dict[str, Callable[[], nn.Module]] = {
            "slots": lambda: Ticks(Slots().tick),
            "list in a partial": lambda: Ticks(functools.partial(_add, [0])),
            "array": lambda: Ticks(functools.partial(_add, array.array("d", [0]))),
            "batch norm in a list": Loose,
        }
        self.by_step: dict[str, Callable[[], nn.Module]] = {
            "dropout later": lambda: Do(lambda part, x: F.dropout(part(x), 0.2 if self.late else 0.0), linear()),
            "another weight later": lambda: Do(lambda a, b, x: (b if self.late else a)(x), linear(), linear()),
            "second use later": lambda: Do(
                lambda part, x: part(x) * part.weight.mean() if self.late else part(x), linear()
            ),
            "hidden use later": lambda: Do(lambda part, x: _twice(part, x) if self.late else part(x), linear()),
            "autocast later": lambda: Do(lambda part, x: _cast(part, x) if self.late else part(x), linear()),
            "fork_rng later": lambda: Do(lambda part, x: _forks(part, x) if self.late else part(x), linear()),
            "jvp later": lambda: Do(lambda part, x: _along(part, x) if self.late else part(x), linear()),
            "in place later": lambda: Do(lambda part, x: part(x.mul_(0.5) if self.late else x * 0.5), linear()),
            "checkpoint later": lambda: Do(
                lambda part, x: checkpoint(part, x, use_reentrant=False) if self.late else part(x), linear()
            ),
            "hook after accumulation": lambda: _scaled_after(linear()),
        }
        self.shared: dict[str, Callable[[], nn.Module]] = {
            "shared generator": lambda: Do(
                lambda part, x: part(x) * torch.rand(WIDTH, generator=self.generator), linear()
            )
        }
        self.stream = stream

    @property
    def late(self) -> bool:
        return self.clock.step >= self.begins

    def put(self, rng: random.Random, layers: list[nn.Module], names: list[str]) -> None:
        """In the place of some of the layers."""
        known = self.by_data if self.stream else {**self.by_data, **self.by_step}
        if not self.stream and rng.random() < 0.05:
            known = self.shared
        for place in rng.sample(range(len(layers)), min(len(layers), rng.randint(1, 3))):
            names[place] = rng.choice(list(known))
            layers[place] = known[names[place]]()
            choice = random.Random(f"{names}")
            if isinstance(layers[place], Stateful) and choice.random() < 0.6:
                names[place] = choice.choice(list(self.elsewhere))
                layers[place] = self.elsewhere[names[place]]()

    def use_elsewhere(self, rng: random.Random, layers: list[nn.Module], names: list[str]) -> None:
        """A layer that uses the weight of another one, later or now and then, without having it."""
        linears = [each for layer in layers for each in layer.modules() if type(each) is nn.Linear]
        linears = [
            each for each in linears if tuple(each.weight.shape) == (WIDTH, WIDTH) and each.weight.dtype.itemsize > 2
        ]
        if self.stream or rng.random() > 0.2 or not linears:
            return
        owner, place, by_data = rng.choice(linears), rng.randrange(1, len(layers)), rng.random() < 0.5
        weights = [owner.weight]  # in a list, so that no module has it

        def hidden(part: nn.Module, value: Any) -> Any:
            made = part(value)
            h = made["h"] if isinstance(made, dict) else made
            if h.mean() > 0 if by_data else self.late:
                h = h + F.linear(h, weights[0].to(h.dtype)) * 0.1
            return {**made, "h": h} if isinstance(made, dict) else h

        layers[place] = Do(hidden, layers[place])
        names.append(f"layer {place} uses another's weight {'by the data' if by_data else 'later'}")

    def penalise(
        self, rng: random.Random, layers: Sequence[nn.Module], names: list[str], loss: Callable[[Any, Any], Tensor]
    ) -> Callable[[Any, Any], Tensor]:
        """A penalty on weights of all stages that is not always there."""
        if self.stream or isinstance(loss, nn.Module) or rng.random() > 0.25:
            return loss
        kind = rng.choice(("later", "every third step", "by the data"))
        chosen = list(dict.fromkeys(p for layer in layers for p in layer.parameters()))
        chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
        names.append(f"penalty {kind}")

        def penalised(outputs: Any, target: Any) -> Tensor:
            value = loss(outputs, target)
            if {"later": self.late, "every third step": self.clock.step % 3 == 2}.get(kind, bool(target.mean() > 0)):
                value = value + 0.01 * torch.stack([p.to(value.dtype).square().sum() for p in chosen]).sum()
            return value

        return penalised


def aliased(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Hands on a tensor and views of it."""
    h = part(state["h"]) + 0.5
    return {**state, "h": h, "skip": h.view(h.shape), "part": h[..., : WIDTH // 2]}


def changes(part: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Changes what was handed on where it is, unless torch would refuse that, since others have used it."""
    if (view := state.pop("part", None)) is not None:
        view.mul_(0.5)
    return {**state, "h": part(state["h"] * 1.5)}


def used(way: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """After which nothing may be changed any more."""
    return lambda part, state: {key: value for key, value in way(part, state).items() if key != "part"}
