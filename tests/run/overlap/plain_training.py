"""Training runs to compare: a loop as a user would write it, which shares no code with gapless, and a pipeline whose
optimizer step does not wait.
"""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless

WIDTH = 6
SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v", "auto", "gpipe", "interleaved")


class Signs(torch.optim.Optimizer):
    """An optimizer of one's own: momentum of signs, a number in its state that is no tensor, and one in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for each in group["params"]:
                if each.grad is None:
                    continue
                state = self.state[each]
                state["times"] = state.get("times", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(each)) + 0.1 * each.grad.sign()
                each.sub_(state["mean"], alpha=group["lr"] / state["times"] ** 0.5 / group["steps"] ** 0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "own": lambda parameters: Signs(parameters, lr=0.02),
}


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    seed: int
    schedule: str = "1f1b"
    devices: int = 4
    microbatches: int = 4
    optimizer: str = "adamw"
    max_norm: float | None = 1.0
    norms: bool = False  # batch norms, whose buffers forwards move
    tied: bool = False
    remat: str = "none"
    scheduled: bool = True
    bad: tuple[int, ...] = ()  # steps with a NaN or an inf
    large: tuple[int, ...] = ()  # steps whose gradients are large
    read: tuple[int, ...] = ()  # steps after which something is read
    parts: int = 1  # of an update, each a step of its own
    scale: float | None = None  # of a GradScaler at first: so large that gradients overflow now and then
    half: bool = False  # float16 autocast

    @classmethod
    def random(cls, seed: int, steps: int, **fixed: Any) -> "Run":
        draw = random.Random(seed)

        def some(share: float) -> tuple[int, ...]:
            return tuple(step for step in range(steps) if draw.random() < share)

        chosen = {
            "schedule": draw.choice(SCHEDULES),
            "devices": draw.randint(2, 4),
            "microbatches": draw.randint(1, 6),
            "optimizer": draw.choice(list(OPTIMIZERS)),
            "max_norm": draw.choice([None, 0.3, 1.0, 3.0]),
            "norms": draw.random() < 0.4,
            "tied": draw.random() < 0.3,
            "remat": draw.choice(["none", "none", "stage", "layer"]),
            "scheduled": draw.random() < 0.7,
            "bad": some(0.08),
            "large": some(draw.choice([0.0, 0.1, 0.4])),
            "read": some(0.1),
            "parts": draw.choice([1, 1, 2]),
            "scale": draw.choice([None, None, 2.0**119]),
        }
        return cls(seed, **{**chosen, **fixed})

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
            layers += [nn.BatchNorm1d(WIDTH)] if self.norms else []
        if self.tied:
            layers[-2 - self.norms].weight = layers[0].weight
        return nn.Sequential(*layers)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        count = 2 * self.microbatches + (0 if self.norms else step % 2)
        x, y = (torch.randn(count, WIDTH, generator=draw) for _ in range(2))
        if step in self.large:
            y = 20 * y
        if step in self.bad:
            x[step % count, 0] = (float("nan"), float("inf"))[step % 2]
        return x, y

    def optimizer_of(self, parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
        made = OPTIMIZERS[self.optimizer](parameters)
        return made, torch.optim.lr_scheduler.StepLR(made, 3, 0.9) if self.scheduled else None

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.float16) if self.half else nullcontext()

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", self.scale or 1.0, growth_interval=2, enabled=self.scale is not None)


@dataclass
class Found:
    """What a run has left: all of it is compared."""

    losses: list[Tensor]
    norms: list[Tensor]
    states: list[dict[str, Tensor]]  # of the model, wherever it was read, and at the end
    kept: dict[int, dict[str, Any]]  # of the optimizer, at the end
    lr: float
    scaler: dict[str, Any]


def plain(run: Run, steps: int) -> Found:
    """A loop over microbatches on one device."""
    model = run.model()
    optimizer, scheduler = run.optimizer_of(model.parameters())
    found, scaler = Found([], [], [], {}, 0.0, {}), run.scaler()
    for step in range(steps):
        x, y = run.batch(step)
        total = None
        for part, target in zip(x.tensor_split(run.microbatches), y.tensor_split(run.microbatches), strict=True):
            with run.autocast():
                loss = F.mse_loss(model(part), target)
            weight = len(part) / len(x) / run.parts
            scaler.scale(loss * weight).backward()
            total = loss.detach() * weight if total is None else total + loss.detach() * weight
        assert total is not None
        found.losses.append(total)
        if step % run.parts == run.parts - 1:
            limit = float("inf") if run.max_norm is None else run.max_norm
            scaler.unscale_(optimizer)
            norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
            found.norms.append(norm)
            if norm.isfinite():
                nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
                scaler.step(optimizer)
                if scheduler is not None:
                    scheduler.step()
            scaler.update()
            optimizer.zero_grad()
            if step in run.read:
                found.states.append(copy.deepcopy(model.state_dict()))
    found.scaler = scaler.state_dict()
    return _ended(found, model.state_dict(), optimizer, list(model.parameters()))


def overlapped(run: Run, steps: int, **where: Any) -> Found:
    """The same in a pipeline; `where` are its devices, or a mesh."""
    model = run.model()
    where = where or {"devices": run.devices}
    with gapless.Pipeline(
        model,
        schedule=run.schedule,
        microbatches=run.microbatches,
        loss=F.mse_loss,
        remat=run.remat,  # type: ignore[arg-type]
        tied="exact",
        **where,
    ) as pipe:
        optimizer, scheduler = run.optimizer_of(pipe.parameters())
        scaler = run.scaler()
        training = pipe.training(optimizer, max_norm=run.max_norm, scheduler=scheduler, scaler=scaler)
        found, results = Found([], [], [], {}, 0.0, {}), list[Any]()
        for step in range(steps):
            updates = step % run.parts == run.parts - 1
            with run.autocast():
                results.append(training.step(*run.batch(step), weight=1 / run.parts, sync=updates))
            if step in run.read and updates:
                found.states.append(copy.deepcopy(pipe.state_dict()))
                pipe.evaluate(torch.randn(4, WIDTH))
        mine = [each for each in model.parameters() if pipe._world.holds(each)]
        state, found.scaler = pipe.state_dict(), scaler.state_dict()
        found.losses = [result.loss for result in results if result.loss is not None]
        found.norms = [each.norm for each in results[run.parts - 1 :: run.parts] if each.norm is not None]
        return _ended(found, copy.deepcopy(state), optimizer, list(model.parameters()), mine)


def _ended(
    found: Found, state: Any, optimizer: Any, parameters: list[nn.Parameter], mine: list[nn.Parameter] | None = None
) -> Found:
    found.states.append(state)
    held = {id(each) for each in (parameters if mine is None else mine)}
    for number, each in enumerate(parameters):
        if id(each) in held and each in optimizer.state:
            found.kept[number] = copy.deepcopy(dict(optimizer.state[each]))
    found.lr = optimizer.param_groups[0]["lr"] + 1000 * optimizer.param_groups[0].get("steps", 0)
    return found


def differences(wanted: Found, got: Found) -> Sequence[str]:
    """Where two runs differ, in words."""
    wrong = [f"loss {n}" for n, (a, b) in enumerate(zip(wanted.losses, got.losses, strict=True)) if not _same(a, b)]
    wrong += [f"norm {n}" for n, (a, b) in enumerate(zip(wanted.norms, got.norms, strict=True)) if not _same(a, b)]
    for number, (one, other) in enumerate(zip(wanted.states, got.states, strict=True)):
        wrong += [f"{name} in state {number}" for name in one if not _same(one[name], other[name])]
    for number, kept in got.kept.items():
        if wanted.kept[number].keys() != kept.keys():
            wrong.append(f"keys of parameter {number}: {[*kept]}")
        wrong += [f"{key} of parameter {number}" for key in kept if not _same(wanted.kept[number][key], kept[key])]
    wrong += [f"scaler {got.scaler}, not {wanted.scaler}"] if wanted.scaler != got.scaler else []
    return wrong + ([f"lr {got.lr}"] if wanted.lr != got.lr else [])


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
