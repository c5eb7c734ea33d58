"""The models of GPipe's tables: AmoebaNet-D (L, D) on images, and a Transformer of L layers as a language model.

Nobody has measured them: their profiles are counted. Layers are on the meta device, where a tensor has a shape and no
data. Each runs forward and backward there: the bytes of what autograd keeps are counted, and so are multiplications and
additions. A backward takes two forwards' worth, half of it for the weights.

The profile of a larger model is that of a smaller one with its cells repeated: cells of one group are alike but for the
first two, which still see what came before the group.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from gapless.plan.profile.meter import StorageMeter, bytes_of
from gapless.plan.profile.profile import Layer, Profile, Seconds
from gapless.zoo.amoebanet import amoebanet
from gapless.zoo.gpt import gpt, next_token_loss

OPERATIONS_PER_SECOND = 1e13  # any number will do: only the shares of the layers count
VOCABULARY = 32_000


def transformer(depth: int, width: int, tokens: int) -> nn.Sequential:
    """For sequences of so many tokens, with heads of size 64; data is where the caller's default device has it."""
    return gpt(vocab=VOCABULARY, width=width, depth=depth, heads=max(1, width // 64), context=tokens)


def transformer_profile(layers: int, samples: int, width: int = 2048, tokens: int = 1024) -> Profile:
    """Without data."""
    return replace(deeper(_transformer(samples, width, tokens), layers), name=f"Transformer-{layers}")


@cache
def _transformer(samples: int, width: int, tokens: int) -> Profile:
    with torch.device("meta"):
        model, ids = transformer(1, width, tokens), torch.zeros(samples, tokens, dtype=torch.long)
    return counted("", list(model), ids, ids, next_token_loss)


def deeper(profile: Profile, layers: int) -> Profile:
    """The profile of a Transformer of one layer, with so many."""
    embed, block, *rest = profile.layers
    return replace(profile, layers=(embed, *[block] * layers, *rest))


def greatest(fits: Callable[[int], bool], first: int = 1) -> int:
    """The greatest number that fits, or 0; `first` is tried first, and then ever larger ones up to 4,096."""
    low, high = 0, first
    while high <= 4096 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def amoebanet_profile(cells: int, filters: int, samples: int, side: int = 224) -> Profile:
    """Without data: images of that many pixels each way."""
    if cells < 9:
        return _amoebanet(cells, filters, samples, side)
    small = _amoebanet(9, filters, samples, side)  # 3 in each group
    repeated: list[Layer] = []
    for number, layer in enumerate(small.layers):
        # 0 stem, 1 and 2 reductions, then three times: three cells and a reduction, or the head
        last_of_group = number in (5, 9, 13)
        repeated += [layer] * (cells // 3 - 2 if last_of_group else 1)
    return replace(small, name=f"AmoebaNet-D ({cells}, {filters})", layers=tuple(repeated))


@cache
def _amoebanet(cells: int, filters: int, samples: int, side: int) -> Profile:
    with torch.device("meta"):
        model = amoebanet(cells=cells, filters=filters)
        images, target = torch.empty(samples, 3, side, side), torch.zeros(samples, dtype=torch.long)
    return counted(f"AmoebaNet-D ({cells}, {filters})", list(model), images, target, F.cross_entropy)


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
        made = layer(leaves)
        outputs = made if loss is None else loss(made, target)
        seconds = Seconds(meter.counted().flops / OPERATIONS_PER_SECOND)
        del leaves
        after = pytree.tree_map(partial(_later, torch.empty), made)
        boundary = bytes_of(pytree.tree_leaves(made)) if loss is None else 0
        ends = [each for each in pytree.tree_leaves(outputs) if each.requires_grad]
        edges, grads = [get_gradient_edge(each) for each in ends], [_later(torch.ones, each) for each in ends]
        with_outputs = meter.live()
        forward = meter.peak()
        del made, outputs, ends
        held = meter.live()
        meter.peak()
        torch.autograd.backward(edges, [make() for make in grads])
        workspace = meter.peak() - held
    weights = bytes_of(layer.parameters())
    times: Any = dict.fromkeys(("forward", "input_grad", "weight_grad", "recompute"), seconds)
    taken = max(0, workspace - weights)  # the gradients of the weights are there by now, and counted elsewhere
    amounts: Any = dict.fromkeys(("workspace", "halves_workspace", "weight_workspace"), taken)
    amounts |= {"activation": held, "kept_for_weight_grad": held, "forward_workspace": max(0, forward - held)}
    amounts |= {"parameters": weights + bytes_of(layer.buffers()), "gradients": weights, "optimizer_state": 2 * weights}
    amounts |= {"boundary": boundary, "held_output": max(0, boundary - (with_outputs - held))}
    return Layer(name=name, **times, **amounts), pytree.tree_map(lambda make: make(), after)


def _later(make: Callable[..., Tensor], like: Tensor) -> Callable[[], Tensor]:
    """Makes a tensor of this shape and type, and holds none."""
    return partial(make, like.shape, dtype=like.dtype, device="meta")


def _own(tensor: Tensor) -> Tensor:
    """A copy, so that it counts if the layer keeps it."""
    made = tensor.detach().clone()
    return made.requires_grad_() if made.is_floating_point() else made
