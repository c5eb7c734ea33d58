"""What the layers of a model without data hold and how many operations they take: a profile that no machine measured.

Layers are on the meta device, where a tensor has a shape and no data. Each runs forward and backward there: the bytes
of what autograd keeps are counted, and so are multiplications and additions. A backward takes two forwards' worth, half
of it for the weights.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from gapless.plan.profile.meter import StorageMeter, bytes_of
from gapless.plan.profile.profile import Layer, Profile, Seconds

OPERATIONS_PER_SECOND = 1e13  # any number will do: only the shares of the layers count


def counted(name: str, layers: Sequence[nn.Module], inputs: Any, target: Any, loss: Callable[..., Tensor]) -> Profile:
    """Of one microbatch; all tensors are on the meta device. Weights are trained by Adam: 16 bytes for each number."""
    found = []
    value = inputs
    for number, layer in enumerate(layers):
        end = loss if number == len(layers) - 1 else None
        one, value = _layer(f"{number}.{type(layer).__name__}", layer, value, target, end)
        found.append(one)
    samples = pytree.tree_leaves(inputs)[0].size(0)
    size = sum(each.nbytes for each in pytree.tree_leaves(inputs))
    return Profile(name, tuple(found), samples=samples, input=size)


def _layer(
    name: str, layer: nn.Module, given: Any, target: Any, loss: Callable[..., Tensor] | None
) -> tuple[Layer, Any]:
    layer = copy.deepcopy(layer)
    meter = StorageMeter()
    with meter.on():
        leaves = pytree.tree_map(_own, given)
        with FlopCounterMode(display=False) as operations:
            made = layer(leaves)
            outputs = made if loss is None else loss(made, target)
        del leaves
        returned, structure = pytree.tree_flatten(made)
        shapes = [(each.shape, each.dtype) for each in returned]
        del returned
        boundary = bytes_of(pytree.tree_leaves(made)) if loss is None else 0
        ends = [each for each in pytree.tree_leaves(outputs) if each.requires_grad]
        edges = [get_gradient_edge(each) for each in ends]
        sizes = [(each.shape, each.dtype) for each in ends]
        with_outputs = meter.live()
        forward = meter.peak()
        del made, outputs, ends
        held = meter.live()
        meter.peak()
        grads = [torch.ones(shape, dtype=dtype, device="meta") for shape, dtype in sizes]
        torch.autograd.backward(edges, grads)
        workspace = meter.peak() - held
    weights = bytes_of(layer.parameters())
    seconds = Seconds(operations.get_total_flops() / OPERATIONS_PER_SECOND)
    one = Layer(
        name=name,
        forward=seconds,
        input_grad=seconds,
        weight_grad=seconds,
        recompute=seconds,
        parameters=weights + bytes_of(layer.buffers()),
        gradients=weights,
        optimizer_state=2 * weights,
        activation=held,
        kept_for_weight_grad=held,
        boundary=boundary,
        workspace=max(0, workspace - weights),  # the gradients of the weights are there by now, and counted elsewhere
        forward_workspace=max(0, forward - held),
        halves_workspace=max(0, workspace - weights),
        weight_workspace=max(0, workspace - weights),
        held_output=max(0, boundary - (with_outputs - held)),
    )
    after = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    return one, pytree.tree_unflatten(after, structure)


def _own(tensor: Tensor) -> Tensor:
    """A copy, so that it counts if the layer keeps it."""
    made = tensor.detach().clone()
    return made.requires_grad_() if made.is_floating_point() else made
