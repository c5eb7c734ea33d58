"""Batch norms inside torch.utils.checkpoint in a trace.

A trace has no checkpoints, so each batch norm is there once. A plain loop runs it again in the backward, and that moves
its running statistics once more. So the trace says around which batch norms there were checkpoints, and how many.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from gapless.stage.random.draws import checkpoints_around

from .untraceable import LostError

RECOMPUTES = "gapless_recomputes"  # of a node: how often a plain loop computes it again
_NORM = torch.ops.aten.batch_norm.default


class CheckpointedNorms(TorchFunctionMode):
    """While it is on, calls of batch norms are counted, with the checkpoints around each."""

    def __init__(self) -> None:
        super().__init__()
        self._around: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.batch_norm, torch.batch_norm, _NORM):
            self._around.append(checkpoints_around())
        return func(*args, **(kwargs or {}))

    @property
    def checkpointed(self) -> bool:
        """Whether there are checkpoints around any."""
        return any(self._around)

    def mark(self, module: GraphModule) -> None:
        """Marks the nodes of a trace that are those calls."""
        if not self.checkpointed:
            return
        nodes = list(_norms(module))
        if len(nodes) != len(self._around) or any(
            times and node.graph is not module.graph for node, times in zip(nodes, self._around, strict=True)
        ):
            raise LostError(
                "a batch norm inside two torch.utils.checkpoint, or inside one under another grad mode or autocast, "
                "whose running statistics a trace would update less often than plain training: take it out of the "
                "checkpoint, or use remat= in place of the checkpoint"
            )
        counters = {
            str(node.args[0].target): node
            for node in module.graph.nodes
            if node.target is torch.ops.aten.add_.Tensor and isinstance(node.args[0], Node)
        }
        for node, times in zip(nodes, self._around, strict=True):
            mean = node.args[3]
            if times and isinstance(mean, Node):
                node.meta[RECOMPUTES] = times
                counter = counters.get(str(mean.target).replace("running_mean", "num_batches_tracked"))
                if counter is not None:
                    counter.meta[RECOMPUTES] = times


def _norms(module: GraphModule) -> Iterator[Node]:
    """Those of a graph and of the parts that its nodes run, in order."""
    for node in module.graph.nodes:
        if node.target is _NORM:
            yield node
        if node.op == "call_function":
            for each in node.all_input_nodes:
                body = getattr(module, str(each.target), None) if each.op == "get_attr" else None
                if isinstance(body, GraphModule):
                    yield from _norms(body)
