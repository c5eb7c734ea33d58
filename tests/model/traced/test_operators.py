"""Operators of a trace are called as the functions that people write: the same kernels, gradients and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from gapless.model.traced.operators import FUNCTIONS, as_function

aten = torch.ops.aten
_LAST = 2**63 - 1  # as traces write "to the end"
# The arguments after the first, a tensor of shape (2, 3, 4); for each operator some forms that traces have.
BINARY: list[Any] = [(torch.arange(4.0) + 1,), (2,), (0.5,)]
CALLS: dict[str, list[Any]] = {
    **{f"{name}.Tensor": BINARY for name in ("add", "sub", "mul", "div")},
    **{f"{name}.default": [()] for name in ("neg", "rsqrt", "tanh", "relu", "sigmoid", "cos", "sin", "silu", "gelu")},
    "pow.Tensor_Scalar": [(2,), (0.5,), (3.0,)],
    "mean.dim": [([-1], True), ([0, 1],), (None,)],
    "cat.default": [(), (-1,), (1,)],
    "transpose.int": [(1, 2), (-1, 0)],
    "unsqueeze.default": [(0,), (-1,)],
    "reshape.default": [([6, 4],), ([2, -1],)],
    "permute.default": [([2, 0, 1],)],
    "select.int": [(1, -1), (-1, 0)],
    "softmax.int": [(-1,), (1, torch.float64)],
    "layer_norm.default": [([4],), ([4], torch.arange(4.0), torch.ones(4), 1e-5, False)],
    "chunk.default": [(2, -1), (3, 1)],
    "view.default": [([6, 4],), ([2, -1],)],
    "expand.default": [([5, -1, 3, 4],)],
    "contiguous.default": [()],
    "to.dtype": [(torch.float32,), (torch.float64,), (torch.bfloat16, False, True)],
    "type_as.default": [(torch.zeros(1, dtype=torch.float64),), (torch.zeros(1),)],
    "slice.Tensor": [(), (1,), (2, 1), (2, 0, 2), (2, 2, _LAST), (-1, 0, 3, 2), (-2, -2, _LAST), (0, 0, _LAST)],
}


def both_ways(call: str, given: Tensor, rest: tuple[Any, ...]) -> list[Any]:
    """What the operator gives, and what is called in its place."""
    name, overload = call.split(".")
    found = []
    for change in (lambda node: None, as_function):
        graph = Graph()
        x = graph.placeholder("x")
        tensors = {each: graph.placeholder(f"y{at}") for at, each in enumerate(rest) if isinstance(each, Tensor)}
        others = [tensors[each] if isinstance(each, Tensor) else each for each in rest]
        made = graph.call_function(getattr(getattr(aten, name), overload), ([x, x] if name == "cat" else x, *others))
        change(made)
        graph.output(made)
        found.append(GraphModule({}, graph)(given * 1, *tensors))
    return found


def test_every_operator_that_is_called_otherwise_is_tried_here() -> None:
    assert {str(each).removeprefix("aten.") for each in FUNCTIONS} | {"slice.Tensor"} == CALLS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_a_function_does_what_the_operator_does(call: str) -> None:
    torch.manual_seed(0)
    for rest in CALLS[call]:
        leaf = (torch.rand(2, 3, 4) + 0.1).requires_grad_()
        results = []
        for found in both_ways(call, leaf, rest):
            parts = list(found) if isinstance(found, tuple | list) else [found]
            seen = [(each.shape, each.stride(), each.dtype, each._is_view()) for each in parts]
            whole = call == "slice.Tensor" and parts[0].shape == leaf.shape  # people get it as it is
            names = None if whole else [each.grad_fn.name() for each in parts if each.grad_fn is not None]
            (grad,) = torch.autograd.grad(sum((each.double() * each.double()).sum() for each in parts), leaf)
            results.append((seen, names, [*parts, grad]))
        (seen, names, tensors), (seen_now, names_now, tensors_now) = results
        assert (seen_now, names_now) == (seen, names), rest
        assert all(map(torch.equal, tensors_now, tensors)), rest
