"""Weight gradients of compiled layers wait for W, with the bits of the same layers compiled in the plain loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gapless
from gapless.errors import ConfigError
from gapless.stage.compiled import cut
from gapless.stage.stage import Stage
from tests.pipelines import assert_same, assert_same_gradients, schedule_named

WIDTH, SEED = 8, 5


pytestmark = pytest.mark.usefixtures("compiled_anew")


class Block(nn.Module):
    """A norm, a frozen bias, dropout."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.p = nn.LayerNorm(WIDTH), p
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class Twice(nn.Module):
    """One weight in two products, and two weights with the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v, self.u = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w) @ self.w.t() + x @ (self.v + self.u)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return x + self.conv(x.view(-1, 2, WIDTH // 2)).reshape(x.shape)


class Broken(nn.Module):
    """Two regions, of which both use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(x) + self.first(x)


class OneSample(nn.Module):
    """A product for several samples, and a sum for one, as inductor has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w if x.shape[0] > 1 else (x.t() * self.w).sum(0, keepdim=True)


KINDS: list[Callable[[], nn.Module]] = [Block, lambda: Block(0.2), Twice, Convolution, Broken, OneSample]


def compiled(layers: Any, backend: str = "aot_eager", **options: Any) -> list[Any]:
    return [torch.compile(layer, backend=backend, **options) for layer in layers]


def assert_exact(
    layers: list[Any], plain: list[Any], *, samples: int = 8, autocast: bool = False, **options: Any
) -> str:
    """Two steps: losses and gradients are those of the plain loop. Returns what the pipeline says of itself."""
    with gapless.Pipeline(layers, microbatches=4, loss=F.mse_loss, seed=SEED, **options) as pipe:
        for step in range(2):
            torch.manual_seed(step)
            x, y = torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                ours = pipe.step(x, y)
                theirs = gapless.plain_step(plain, x, y, loss=F.mse_loss, microbatches=4, seed=SEED, step=step)
            assert_same(ours.losses, tuple(theirs.losses), f"step {step}")
            assert_same_gradients(layers, plain, f"step {step}")
        return str(pipe)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 30)))])
def test_random_compiled_models_give_the_bits_of_the_plain_loop(seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = [draw.choice(KINDS)() for _ in range(4)]
    if draw.random() < 0.3:
        model[3] = model[draw.choice([0, 2])]
    reference = copy.deepcopy(model)
    eager, dynamic = [draw.random() < 0.2 for _ in model], draw.choice([None, True, False])

    def made(layers: list[nn.Module]) -> list[Any]:
        known: dict[nn.Module, Any] = {each: compiled([each], dynamic=dynamic)[0] for each in layers}
        return [layer if is_eager else known[layer] for layer, is_eager in zip(layers, eager, strict=True)]

    assert_exact(
        made(model),
        made(reference),
        samples=draw.choice([8, 10, 5]),
        autocast=draw.random() < 0.3,
        devices=2,
        schedule=schedule_named(draw.choice(["1f1b", "zb-h1", "zb-v", "apart"]), 2, 4),
        remat=draw.choice(["none", "stage", "layer"]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_inductors_parts_give_the_bits_of_its_whole_backward(autocast: bool) -> None:
    model = [Block(0.1), Twice(), Convolution(), Block()]
    plain = compiled(copy.deepcopy(model), "inductor", dynamic=False)
    options: dict[str, Any] = {"devices": 2, "schedule": schedule_named("apart", 2, 4), "compile": {"dynamic": False}}
    told = assert_exact([*model], plain, autocast=autocast, **options)
    assert "not deferred" not in told


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_products_of_weight_gradients_run_in_w(backend: str) -> None:
    stage = Stage([cut(compiled([Block()], backend)[0])], first_layer=0, split=True)
    for microbatch in range(2):
        out = stage.forward(microbatch, torch.randn(4, WIDTH, requires_grad=True), step=0)
        with Products() as now:
            stage.backward_input(microbatch, [torch.randn_like(out)])
        with Products() as later:
            stage.backward_weight(microbatch)
        assert (now.count, later.count) == (2, 2)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_gradients_that_wait_in_some_microbatches_are_added_in_their_order() -> None:
    """Of microbatches of 2, 1, 1 and 1 samples only the first one's can wait."""
    model = [OneSample(), OneSample()]
    plain = compiled(copy.deepcopy(model), dynamic=False)
    layers = compiled(model, dynamic=False)
    assert_exact(layers, plain, samples=5, devices=2, schedule=schedule_named("apart", 2, 4))


def test_a_weight_that_an_eager_layer_uses_too_does_not_wait_and_the_pipeline_says_so() -> None:
    block = Block()
    model: list[nn.Module] = [block, nn.Linear(WIDTH, WIDTH), Block(), _Uses(block.up.weight)]
    reference = copy.deepcopy(model)

    def made(layers: Any) -> list[Any]:
        return [*compiled([layers[0]]), layers[1], *compiled([layers[2]]), layers[3]]

    options: dict[str, Any] = {"devices": 1, "schedule": schedule_named("apart", 1, 4)}
    told = assert_exact(made(model), made(reference), **options)
    assert "2 compiled in" in told
    assert "(weight gradients not deferred: layers 0)" in told


class _Uses(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.weight), self.weight.t())


def test_a_layer_that_is_compiled_in_parts_or_in_place_runs_whole_and_the_pipeline_says_so() -> None:
    model = [Block(), Block(), Block()]
    reference = copy.deepcopy(model)

    def made(layers: list[Any]) -> list[Any]:
        layers[1].compile(backend="aot_eager")
        return [nn.Sequential(*compiled([layers[0]])), layers[1], *compiled([layers[2]])]

    options: dict[str, Any] = {"devices": 1, "schedule": schedule_named("apart", 1, 4)}
    assert "(weight gradients not deferred: layers 0, 1)" in assert_exact(made(model), made(reference), **options)


def test_hooks_of_a_compiled_layer_and_of_its_weights_are_called() -> None:
    model = [Block(), Block(), Block()]
    reference = copy.deepcopy(model)
    seen: dict[str, list[Tensor]] = {"ours": [], "theirs": []}

    def made(layers: list[Any], name: str) -> list[Any]:
        layers[2].up.weight.register_hook(lambda grad: 2 * grad)
        layers[1].up.weight.register_post_accumulate_grad_hook(lambda leaf: seen[name].append(leaf.grad.clone()))
        made = compiled(layers)
        made[0].register_forward_hook(lambda *args: 3 * args[2])
        return made

    told = assert_exact(
        made(model, "ours"), made(reference, "theirs"), devices=1, schedule=schedule_named("apart", 1, 4)
    )
    assert_same(seen["ours"], seen["theirs"], "what the hook has seen")
    assert "not deferred: layers 0, 1, 2)" in told


def test_a_tensor_that_changes_before_w_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
            self.register_buffer("basis", torch.ones(4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.basis @ self.weight)  # type: ignore[operator]

    layer = Masked()
    stage = Stage([cut(compiled([layer])[0])], first_layer=0, split=True)
    out = stage.forward(0, torch.randn(4, WIDTH, requires_grad=True), step=0)
    stage.backward_input(0, [torch.randn_like(out)])
    layer.basis.add_(1)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"a tensor that it needs was changed in place meanwhile.*clone"):
        stage.backward_weight(0)


class Averaged(nn.Linear):
    """A buffer that its forward moves and computes with."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x) * torch.sigmoid(self.mean)


def test_a_second_run_in_a_backward_calls_what_the_first_has_compiled() -> None:
    # It was compiled anew, for the mode that looks for late uses of buffers, and ran with other numbers.
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Averaged() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
    plain, x, y = copy.deepcopy(model), torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    options: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss, "compile": {"backend": "aot_eager"}}
    with gapless.Pipeline(model, devices=2, remat="layer", **options) as pipe:
        for _ in range(2):
            pipe.step(x, y)
    torch.compiler.reset()
    layers = [torch.compile(layer, backend="aot_eager") for layer in plain]
    for part, goal in 2 * [*zip(x.chunk(4), y.chunk(4), strict=True)]:
        value: Any = part
        for layer in layers:
            value = layer(value)
        (F.mse_loss(value, goal) / 4).backward()
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad), name
