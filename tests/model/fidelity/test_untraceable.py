"""What a trace could lose, the modes and settings of a model's calls: they are those of the user's loop, or refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

import gapless
from gapless.errors import PartitionError
from gapless.model.traced.piece import moved_body
from tests.pipelines import assert_same_gradients

WIDTH = 6
Context = Callable[[], AbstractContextManager[Any]]


class Three(nn.Module):
    """Its middle is computed in a way of its own."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return self.last(self.third(x) + self.middle(self.second, x))


def without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = layer(x)
    return y


@torch.inference_mode()
def inferred(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y * 2 if torch.is_inference_mode_enabled() and not torch.is_grad_enabled() else y


def inferred_then_copied(layer: nn.Module, x: Tensor) -> Tensor:
    return inferred(layer, x).clone()


def not_inferred(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        y: Tensor = layer(x)
    return y


def graded_again(layer: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        y = layer(x)
        with torch.enable_grad():
            z = layer(y)
        w = 2 * z
    return z + w if torch.is_grad_enabled() else z


def switched(layer: nn.Module, x: Tensor) -> Tensor:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y: Tensor = layer(x)
    torch.set_grad_enabled(before)
    return y


def looks_at_autocast(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return 3 * y if torch.is_autocast_enabled("cpu") else y


def looks_at_its_dtype(layer: nn.Module, x: Tensor) -> Tensor:
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


def looks_at_types(layer: nn.Module, x: Tensor) -> Tensor:
    """As attention does, in many models."""
    y = layer(x)
    return torch.softmax(y, -1, dtype=torch.float32).to(y.dtype)


def casts_in_part(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        y: Tensor = layer(x.float())
        return 3 * y if torch.is_autocast_enabled("cpu") else y


def looks_at_default_dtype(layer: nn.Module, x: Tensor) -> Tensor:
    return x * (2 if torch.get_default_dtype() == torch.float64 else 3)


def looks_whether_it_is_traced(layer: nn.Module, x: Tensor) -> Tensor:
    looks = (torch.compiler.is_compiling, torch.compiler.is_exporting, torch._dynamo.is_compiling)
    y: Tensor = layer(x)
    return y if not any(look() for look in looks) else 3 * y


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("middle", "contexts"),
    [
        (without_grad, [nullcontext]),
        (inferred_then_copied, [nullcontext]),
        (not_inferred, [nullcontext]),
        (graded_again, [nullcontext]),
        (switched, [nullcontext, bfloat16]),
        (looks_at_autocast, [nullcontext, bfloat16, nullcontext]),
        (looks_at_its_dtype, [bfloat16, nullcontext]),
        (looks_at_types, [bfloat16, nullcontext]),
        (casts_in_part, [bfloat16, nullcontext]),
        (looks_at_default_dtype, [nullcontext, double]),
        (looks_whether_it_is_traced, [nullcontext]),
    ],
)
def test_modes_and_settings_are_those_of_the_users_loop(middle: Any, contexts: list[Context]) -> None:
    """A trace let gradients through inference mode, and told a model that autocast was off."""
    model = Three(middle)
    plain = copy.deepcopy(model)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    with gapless.Pipeline(
        model, devices=2, schedule="zb-v", remat="stage", microbatches=2, loss=F.mse_loss, intra_op_threads=1
    ) as pipe:
        for context in contexts:
            with context():
                losses = pipe.step(x, y).losses
            for number, (part, goal) in enumerate(zip(x.tensor_split(2), y.tensor_split(2), strict=True)):
                with context():
                    loss = F.mse_loss(plain(part), goal)
                    share = loss * 0.5
                share.backward()
                assert torch.equal(losses[number], loss)
            assert_same_gradients(model, plain)


def flash_only(layer: nn.Module, x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


def double_in_part(layer: nn.Module, x: Tensor) -> Tensor:
    with double():
        return x + torch.ones(WIDTH)


def seeds_itself(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.rand(WIDTH)


def draws_in_python(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y if random.random() < 0.5 else x


def packs(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.half(), lambda kept: kept.float()):
        y: Tensor = layer(x)
    return y


def changes_data(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    y.data.mul_(2)
    return y


def differentiates_forward(layer: nn.Module, x: Tensor) -> Any:
    return torch.func.jvp(layer, (x,), (x,))[1]


def differentiates(layer: nn.Module, x: Tensor) -> Any:
    return torch.func.grad(lambda x: layer(x).sum())(x)


def differentiates_vectors(layer: nn.Module, x: Tensor) -> Any:
    return torch.vmap(torch.func.grad(lambda x: layer(x).sum()))(x)


def fails_while_it_differentiates(layer: nn.Module, x: Tensor) -> Any:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("of its own")

    return torch.func.vjp(fail, x)[0]


def catches_what_is_said(layer: nn.Module, x: Tensor) -> Any:
    try:
        return differentiates(layer, x)
    except Exception:
        return x


def hooks(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    y.register_hook(lambda grad: grad * 2)
    return y


def hooks_a_node(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inputs, outputs: tuple(None if each is None else each * 2 for each in inputs))
    return y


def hooks_before_a_node(layer: nn.Module, x: Tensor) -> Tensor:
    y = torch.tanh(layer(x))
    if y.grad_fn is not None:
        y.grad_fn.next_functions[0][0].register_prehook(lambda outputs: tuple(each * 2 for each in outputs))  # type: ignore[union-attr]
    return y


def hooks_many(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    torch.autograd.graph.register_multi_grad_hook((y,), lambda grad: None, mode="any")
    return y


def hooks_after(layer: nn.Module, x: Tensor) -> Tensor:
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    y: Tensor = layer(x)
    return y


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_backward_hook_of_a_module_in_its_old_form_is_refused() -> None:
    """It sits on a node of autograd's graph, and was lost without a word."""
    model = Three(lambda layer, x: layer(x))
    model.third.register_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(
        PartitionError, match="register_hook of a node of autograd's graph, as register_backward_hook of"
    ):
        gapless.Pipeline(model, devices=2, microbatches=1, loss=F.mse_loss, example=torch.randn(2, WIDTH))


def casts_and_packs(layer: nn.Module, x: Tensor) -> Tensor:
    with bfloat16(), torch.no_grad():
        return packs(layer, x)


def plain_torch_works() -> bool:
    """As it does in a process that has traced nothing."""
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH)
    layer(x).sum().backward()
    with bfloat16():
        cast = layer(x).dtype
    rows = torch.vmap(torch.func.grad(lambda row: layer(row).sum()))(x)
    tangents = torch.func.jvp(torch.tanh, (x,), (x,))[1]
    exported = torch.export.export(layer, (x,), strict=False).module()
    works = [
        layer.weight.grad is not None and torch.allclose(layer.weight.grad, x.sum(0).expand(WIDTH, WIDTH)),
        cast == torch.bfloat16 and not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled(),
        torch.allclose(rows, layer.weight.sum(0).expand(3, WIDTH)),
        torch.allclose(tangents, x * (1 - torch.tanh(x) ** 2)),
        torch.equal(exported(x), layer(x)),
        type(layer(x)) is Tensor,
    ]
    return all(works)


_GRADIENTS = r"it computes gradients in its forward \(torch.func or autograd.grad\), which no trace can keep"


@pytest.mark.parametrize(
    ("middle", "message"),
    [
        (differentiates_forward, _GRADIENTS),
        (differentiates, _GRADIENTS),
        (differentiates_vectors, _GRADIENTS),
        (fails_while_it_differentiates, _GRADIENTS),
        (catches_what_is_said, _GRADIENTS),
        (hooks, r"register_hook of a tensor, which a trace would lose"),
        (hooks_a_node, r"register_hook of a node of autograd's graph, .* which a trace would lose"),
        (hooks_before_a_node, r"register_prehook of a node of autograd's graph, .* which a trace would lose"),
        (hooks_many, r"register_hook of a tensor, which a trace would lose"),
        (hooks_after, r"register_hook of a tensor, which a trace would lose"),
        (casts_and_packs, r"saved_tensors_hooks, which a trace would lose"),
        (
            changes_data,
            r"can't trace Three: it uses \.data of a tensor, which no trace can follow: use \.detach\(\) in",
        ),
        (flash_only, r"for a part of its forward it sets memory-efficient attention to False, which a trace would"),
        (double_in_part, r"for a part of its forward it sets the default dtype to torch.float64, which a trace"),
        (seeds_itself, r"for a part of its forward it sets the seed to 3, which a trace would lose"),
        (draws_in_python, r"it draws from the generators of Python or NumPy, .*: draw with torch"),
        (packs, r"saved_tensors_hooks, which a trace would lose"),
    ],
)
def test_what_a_trace_would_lose_is_refused_and_torch_is_as_it_was(middle: Any, message: str) -> None:
    """After the refusal of torch.func.jvp no backward of the process worked any more."""
    with pytest.raises(PartitionError, match=message) as refused:
        gapless.Pipeline(Three(middle), devices=2, microbatches=1, loss=F.mse_loss, example=torch.randn(2, WIDTH))
    assert "cut the model by hand" in str(refused.value)
    assert plain_torch_works()


def test_what_others_do_meanwhile_is_their_own() -> None:
    """Torch is as it was, also after a trace that failed."""
    kept = (torch.autograd.Function.apply, Tensor.register_hook, torch.inference_mode.__enter__)
    with pytest.raises(PartitionError, match="would lose"):
        gapless.Pipeline(Three(packs), devices=2, microbatches=1, loss=F.mse_loss, example=torch.randn(2, WIDTH))
    assert kept == (torch.autograd.Function.apply, Tensor.register_hook, torch.inference_mode.__enter__)
    assert torch.get_default_dtype() == torch.float32


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            more = torch.ones(WIDTH, device=x.device)
        return x + more


def test_what_is_made_under_no_grad_is_made_on_the_device_of_its_stage() -> None:
    """The body of such a part kept the device of the trace."""
    trace = torch.export.export(Constant(), (torch.randn(2, WIDTH),), strict=False).module()
    body = next(part for part in trace.children() if isinstance(part, GraphModule))
    (made,) = moved_body(body, (torch.device("cpu"), torch.device("meta")))()
    assert made.device.type == "meta"
    (before,) = body()
    assert before.device.type == "cpu"
