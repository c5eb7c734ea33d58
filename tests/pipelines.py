"""The models that the tests of a pipeline train, and the one comparison they make: with the plain loop, every bit."""

import copy
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.schedule.action import Schedule
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.plain import PlainResult
from gapless.zoo.gpt import gpt, next_token_loss

Model = nn.Sequential | list[Any]
Loss = Callable[[Any, Any], Tensor]


class Do(nn.Module):
    """A layer from a function and the modules it uses."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.parts, *args, **kwargs)


class Own(nn.Module):
    """A module from its forward, which is given it first, and from what it holds."""

    def __init__(self, forward: Callable[..., Any], /, **held: Any) -> None:
        super().__init__()
        self._own = forward
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(self, *args, **kwargs)


def mlp(depth: int = 8, width: int = 6, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, and between them norms, activations and dropout."""
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(width, width),
        nn.Tanh,
        lambda: nn.LayerNorm(width),
        lambda: nn.Dropout(dropout),
    ]
    return nn.Sequential(*(kinds[number % 4]() for number in range(depth)))


def small_gpt(depth: int = 8, dropout: float = 0.1) -> nn.Sequential:
    return gpt(vocab=13, width=8, depth=depth - 3, heads=2, context=6, dropout=dropout)


class Mixed(nn.Module):
    """Takes and returns a dict of everything that may cross between stages."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.embedding = nn.Embedding(5, width)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x, (ids, keep) = state["x"], state["marks"]
        y = torch.tanh(self.linear(x)) * keep + self.embedding(ids) / state["scale"]
        return {**state, "x": y, "skip": x if state["skip"] is None else state["skip"] + x, "marks": (ids, ~keep)}


def dicts(depth: int = 8, width: int = 6) -> nn.Sequential:
    def begin(x: Tensor, ids: Tensor) -> dict[str, Any]:
        return {"x": x, "marks": (ids, x > 0), "skip": None, "scale": 4, "note": "as it is", "none": None}

    def end(state: dict[str, Any]) -> Tensor:
        assert state["note"] == "as it is"
        assert state["none"] is None
        return state["x"] + state["skip"] * 0.125  # type: ignore[no-any-return]

    return nn.Sequential(Do(begin), *(Mixed(width) for _ in range(depth - 2)), Do(end))


@dataclass(frozen=True)
class Case:
    """A model, what it is trained on, and how."""

    name: str
    model: Callable[[int], Model]  # from the number of layers
    batch: Callable[[int], tuple[Any, Any]]  # from the number of microbatches: inputs and target
    loss: Loss = F.mse_loss
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9
    )


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def tokens(samples: int, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(13, (samples, length)), torch.randint(13, (samples, length))


MLP = Case("mlp", mlp, lambda count: (torch.randn(2 * count, 6), torch.randn(2 * count, 6)))
GPT = Case("gpt", small_gpt, lambda count: tokens(count), next_token_loss, adamw)
UNEVEN = Case(
    "uneven",
    lambda depth: mlp(depth, dropout=0.3),
    lambda count: (torch.randn(2 * count + 1, 6), torch.randn(2 * count + 1, 6)),
)
DICTS = Case(
    "dicts",
    dicts,
    lambda count: ((torch.randn(count, 6), torch.randint(5, (count,))), torch.randn(count, 6)),
    optimizer=adamw,
)
CASES = (MLP, GPT, UNEVEN, DICTS)
STEPS = 3
SEED = 11


@dataclass(frozen=True)
class Step:
    """What a step leaves behind: all of it is compared."""

    loss: Tensor
    losses: tuple[Tensor, ...]
    outputs: Any
    grads: tuple[Tensor | None, ...]
    weights: tuple[Tensor, ...]  # after the optimizer


def made(case: Case, depth: int) -> Model:
    torch.manual_seed(3)
    return case.model(depth)


def batches(case: Case, microbatches: int, steps: int = STEPS) -> list[tuple[Any, Any]]:
    torch.manual_seed(5)
    return [case.batch(microbatches) for _ in range(steps)]


@cache
def expected(case: Case, depth: int, microbatches: int, steps: int = STEPS) -> tuple[Step, ...]:
    """The steps of the plain loop: they depend on nothing but the model and the microbatches."""
    model = made(case, depth)

    def step(number: int, inputs: Any, target: Any) -> PlainResult:
        return gapless.plain_step(
            [*model], inputs, target, loss=case.loss, microbatches=microbatches, seed=SEED, step=number
        )

    return trained(case, model, step, microbatches, steps)


def trained(
    case: Case, model: Model, step: Callable[[int, Any, Any], Any], microbatches: int, steps: int
) -> tuple[Step, ...]:
    """Some steps with an optimizer, the last two accumulating into the same gradients."""
    parameters = parameters_of(model)
    optimizer = case.optimizer(iter(parameters))
    done = []
    for number, (inputs, target) in enumerate(batches(case, microbatches, steps)):
        result = step(number, inputs, target)
        grads = tuple(None if p.grad is None else p.grad.clone() for p in parameters)
        optimizer.step()
        if number != steps - 2:
            optimizer.zero_grad()
        weights = tuple(p.detach().clone() for p in parameters)
        done.append(Step(result.loss, tuple(result.losses), result.outputs, grads, weights))
    return tuple(done)


def parameters_of(model: nn.Module | list[Any]) -> list[nn.Parameter]:
    if not isinstance(model, nn.Module):
        model = nn.ModuleList([layer for layer in model if isinstance(layer, nn.Module)])
    return list(model.parameters())


def assert_steps_are_exact(
    case: Case, *, depth: int, devices: int, microbatches: int, steps: int = STEPS, **options: Any
) -> None:
    """A pipeline with these options leaves the bits of the plain loop, step by step."""
    model = made(case, depth)
    with gapless.Pipeline(
        model, devices=devices, microbatches=microbatches, loss=case.loss, seed=SEED, **options
    ) as pipe:

        def step(number: int, inputs: Any, target: Any) -> gapless.Result:
            assert pipe.steps == number
            return pipe.step(inputs, target, outputs=True)

        got = trained(case, model, step, microbatches, steps)
    for number, (ours, plain) in enumerate(zip(got, expected(case, depth, microbatches, steps), strict=True)):
        assert_same(ours, plain, f"step {number}")


def assert_same(ours: Any, plain: Any, where: str) -> None:
    """Two trees of tensors are the same to the bit, layout of gradients included."""
    if isinstance(plain, Step):
        for name in ("loss", "losses", "outputs", "grads", "weights"):
            assert_same(getattr(ours, name), getattr(plain, name), f"{where}, {name}")
        return
    ours_flat, plain_flat = mb.flatten(ours)[0], mb.flatten(plain)[0]
    assert len(ours_flat) == len(plain_flat), where
    for number, (a, b) in enumerate(zip(ours_flat, plain_flat, strict=True)):
        assert a.dtype == b.dtype, f"{where}, tensor {number}"
        assert not a.requires_grad, f"{where}, tensor {number}"
        assert torch.equal(a, b), f"{where}, tensor {number}, off by {(a.double() - b.double()).abs().max().item()}"


def assert_one_model_is_exact(
    model: Model,
    batches: Sequence[tuple[Any, Any]],
    *,
    loss: Loss = F.mse_loss,
    microbatches: int = 4,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    devices: int = 2,
    schedule: str | Schedule = "1f1b",
    loss_weight: Any = None,
    **options: Any,
) -> None:
    """Steps without zero_grad over these batches: losses, outputs and gradients are the plain loop's."""
    reference = copy.deepcopy(model)
    if isinstance(schedule, str):
        schedule = schedule_named(schedule, devices, microbatches)
    asked: dict[str, Any] = {"microbatches": microbatches, "loss": loss, "seed": SEED, "loss_weight": loss_weight}
    with gapless.Pipeline(model, devices=devices, schedule=schedule, **asked, **options) as pipe:
        for number, (inputs, target) in enumerate(batches):
            untouched = copy.deepcopy(inputs)  # a layer may change what it is given
            with context():
                ours = pipe.step(inputs, target, outputs=True)
                plain = gapless.plain_step([*reference], untouched, target, step=number, **asked)
            assert_same(ours.loss, plain.loss, f"step {number}, loss")
            assert_same(ours.losses, tuple(plain.losses), f"step {number}, losses")
            assert_same(ours.outputs, plain.outputs, f"step {number}, outputs")
            assert_same_gradients(model, reference, f"step {number}")


def assert_same_gradients(model: nn.Module | list[Any], reference: nn.Module | list[Any], where: str = "") -> None:
    """Every gradient is there or not as in the reference, with its bits, and none is another's."""
    places: dict[int, int] = {}
    for number, (ours, plain) in enumerate(zip(parameters_of(model), parameters_of(reference), strict=True)):
        name = f"{where}, parameter {number} of shape {tuple(ours.shape)}"
        assert (ours.grad is None) == (plain.grad is None), name
        if ours.grad is not None and plain.grad is not None:
            assert_same(ours.grad, plain.grad, name)
            assert places.setdefault(ours.grad.data_ptr(), number) == number, f"{name} shares its gradient"


def alive(name: str = "gapless") -> list[str]:
    """Threads of pipelines, or of something else that begins with this name."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def schedule_named(name: str, devices: int, microbatches: int) -> str | Schedule:
    """A recipe's name as it is. "text" and "object" are Schedules, one parsed from its text, one made beforehand;
    "apart" has no backward in one piece: every weight gradient waits until the end.
    """
    if name == "apart":
        rows = [[kind for kind in "FIW" for _ in range(microbatches)] for _ in range(devices)]
        text = "\n".join(
            f"{stage}: " + " ".join(f"{stage}{kind}{number % microbatches}" for number, kind in enumerate(row))
            for stage, row in enumerate(rows)
        )
        return Schedule.parse(text)
    if name == "text":
        made = gapless.make_schedule("zb-h1", devices=devices, microbatches=microbatches)
        return Schedule.parse(made.text())
    if name == "object":
        return gapless.make_schedule("zb-v", devices=devices, microbatches=microbatches)
    return name
