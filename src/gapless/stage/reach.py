"""Which parameters a graph reaches: what a stage really uses, whatever its modules say.

A loss with a penalty on all weights, a function that uses a weight from outside, a custom autograd function: no module
and no mode tells of them, but the autograd graph does. It is walked now and then, not for every microbatch.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter


class Reached:
    """The nodes of a graph, and the leaves it ends at with the number of edges that lead to each."""

    def __init__(self, edges: Iterable[GradientEdge | None]) -> None:
        self.nodes: set[Any] = set()
        self.uses: dict[Tensor, int] = {}
        self.casts: set[Tensor] = set()  # leaves of which a cast is used
        to_visit = [edge.node for edge in edges if edge is not None]
        for node in to_visit:
            self._count(node)
        while to_visit:
            node = to_visit.pop()
            if node in self.nodes:
                continue
            self.nodes.add(node)
            for following, _ in node.next_functions:
                if following is not None:
                    self._count(following, node.name())
                    to_visit.append(following)
        self.parameters = [leaf for leaf in self.uses if isinstance(leaf, Parameter)]

    def _count(self, node: Any, by: str = "") -> None:
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            self.uses[leaf] = self.uses.get(leaf, 0) + 1
            if by == "ToCopyBackward0":
                self.casts.add(leaf)
