"""What a traced model's own loss counts, read from its graph.

A model with labels computes its loss itself. Which of them count is in the trace: a causal model shifts its labels, an
encoder-decoder does not, and each names what it leaves out. So the calls that lead from the batch to the targets of a
cross entropy are taken out of the trace, and run for every microbatch before the step:

    labels -> pad -> slice -> view -> cross_entropy(logits, ., ignore_index=-100)
    labels -> pad -> slice -> view -> how many are not -100
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gapless.guards.batches_and_losses import LOSS_COUNTS
from gapless.model.traced.operators import draws, needed
from gapless.model.traced.piece import home_of
from gapless.model.traced.trace import Trace
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.loss_counts import IGNORED, Weighed, number_of, unknown

T = TypeVar("T")
aten = torch.ops.aten
_MEAN, _SUM = (1, "mean"), (2, "sum")
_MOVING = (aten.to.dtype_layout, aten.to.device, aten._to_copy.default)


class Counting:
    """The cross entropies in the loss of one trace, and what each of them takes its mean over."""

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self._inputs = trace.inputs
        loss = loss_in(pytree.tree_unflatten(trace.results, trace.out_spec), Node)
        self.has_loss = loss is not None
        before = set() if loss is None else needed([loss])
        losses = [node for node in trace.nodes if node in before and _leaves_out(node)]
        asked = [_asked(node) for node in losses]
        reductions = {each["reduction"] for each in asked}
        self.summed = bool(reductions) and reductions <= set(_SUM)
        self.known = bool(reductions) and reductions <= set(_MEAN)
        self.num_losses = len(losses)
        if self.known:
            self._build(asked, model)

    def _build(self, asked: Sequence[dict[str, Any]], model: nn.Module) -> None:
        starts = [node for each in asked for node in each.values() if isinstance(node, Node)]
        leading = needed(starts)
        self._used = [node in leading for node in self._inputs]
        attrs = sorted(node for node in leading if node.op == "get_attr")
        self._homes = [home_of(model, node) for node in attrs]
        calls = [node for node in self._inputs[0].graph.nodes if node in leading and node.op == "call_function"]
        values = [getattr(owner, name) for owner, name in self._homes]
        # Otherwise the targets are made by the model itself.
        self.known = all(isinstance(value, Tensor) and not isinstance(value, nn.Parameter) for value in values)
        if any(draws(node) or isinstance(node.target, torch._ops.HigherOrderOperator) for node in calls):
            self.known = False
        if not self.known:
            return
        graph = Graph()
        made = {node: graph.placeholder(node.name) for node in (*self._inputs, *attrs)}
        self._device: torch.device | None = None  # where new tensors are made on the way, if any are
        for node in calls:
            made[node] = graph.node_copy(node, made.__getitem__)
            made[node].meta = {}
            device = node.kwargs.get("device")
            if node.target in _MOVING:
                made[node].kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
            elif isinstance(device, torch.device):
                self._device = device
        numbers = [
            graph.call_function(
                number_of, torch.fx.map_arg((each["target"], each["ignored"], each["weight"]), made.get)
            )
            for each in asked
        ]
        graph.output(numbers)
        self._run = GraphModule({}, graph).forward

    def __call__(self, flat: Sequence[Any]) -> list[Tensor]:
        """Of one microbatch, as many numbers as there are losses."""
        # The rest of the batch may be large, and anywhere.
        used = [leaf if needed else None for leaf, needed in zip(flat, self._used, strict=True)]
        held = [getattr(owner, name) for owner, name in self._homes]
        device = self._device or next((leaf.device for leaf in used if isinstance(leaf, Tensor)), torch.device("cpu"))
        values = [value.to(device) if isinstance(value, Tensor) else value for value in (*used, *held)]
        return list(self._run(*values))


def weighed_by(
    countings: Sequence[Counting], flats: Sequence[Sequence[Any]], counts: Sequence[int], parts: Sequence[Any]
) -> Weighed:
    """What microbatches count for the model's own loss; `countings` and `flats` are theirs, `parts` are their
    inputs.
    """
    samples = [float(count) for count in counts]
    if all(each.num_losses == 0 for each in countings):
        return unknown(counts, flats, parts)
    if all(each.summed for each in countings) and all("num_items_in_batch" in mb.call_of(each)[1] for each in parts):
        return Weighed(samples, summed=True)  # each loss is a part of all items' mean already
    if not all(each.known and each.num_losses == countings[0].num_losses for each in countings):
        return unknown(counts, flats, parts)
    with torch.no_grad():
        found = [torch.stack(each(flat)).double() for each, flat in zip(countings, flats, strict=True)]
    rows = torch.stack(found).cpu().t().tolist()  # for each loss, what the microbatches count
    first = rows[0]
    for row in rows[1:]:
        if not _same_shares(row, first):
            raise LOSS_COUNTS.refusal(
                f"the model's own loss has {len(rows)} parts, which count different shares of the microbatches "
                f"({_shown(first)} and {_shown(row)} of their targets), so no weight of a microbatch is right for both",
                "pass loss=, a function of the outputs and the target, or loss_weight= to choose one",
            )
    return Weighed(samples if _same_shares(first, samples) else first)


def _same_shares(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a * sum(other) == b * sum(one) for a, b in zip(one, other, strict=True))


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _leaves_out(node: Node) -> bool:
    """Whether it is a cross entropy: an operator with targets of which some are ignored."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and {"target", "ignore_index"} <= {arg.name for arg in schema.arguments}


def _asked(node: Node) -> dict[str, Any]:
    """The arguments of a loss, under their names."""
    named = dict(zip((arg.name for arg in node.target._schema.arguments), node.args, strict=False)) | dict(node.kwargs)  # type: ignore[union-attr]
    return {
        "target": named["target"],
        "weight": named.get("weight"),
        "reduction": named.get("reduction", _MEAN[0]),
        "ignored": named.get("ignore_index", IGNORED),
    }


def loss_in(outputs: Any, kind: type[T]) -> T | None:
    """The loss that a model computes itself: `.loss`, `["loss"]`, the one scalar in a tuple, or the one thing that it
    returns.
    """
    if isinstance(outputs, kind):
        return outputs
    found = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, tuple | list):
        scalars = [each for each in outputs if _is_scalar(each)]
        found = scalars[0] if len(scalars) == 1 else None
    return found if isinstance(found, kind) else None


def _is_scalar(value: Any) -> bool:
    value = value.meta.get("val") if isinstance(value, Node) else value
    return isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point()
