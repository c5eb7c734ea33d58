"""Which parameters a graph reaches: what a stage really uses, whatever its modules say.

A loss with a penalty on all weights, a function that uses a weight from outside, a custom autograd function: no module
tells of them, but the autograd graph does. To walk it costs a fourteenth of a forward on small tensors, so it is done

    always                           for a number of nodes that is new: somebody does something else
    for code that is not torch's     in the first microbatch of every step; where the mode has seen a parameter of
                                     another place, though as many nodes were made; and where no mode looks on
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter

nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr  # by this thread, so far
_CAST = "ToCopyBackward0"
_END: Any = type(
    get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node
)  # what adds to a leaf's gradient


class Reached:
    """The leaves that a graph ends at."""

    def __init__(self, edges: Iterable[GradientEdge | None]) -> None:
        starts = [edge.node for edge in edges if edge is not None]
        self._ends: list[tuple[Any, Any]] = [(node, None) for node in starts if type(node) is _END]
        seen: set[Any] = set(starts)
        to_visit = [node for node in starts if type(node) is not _END]
        found = self._ends.append
        while to_visit:
            node = to_visit.pop()
            for following, _ in node.next_functions:
                if type(following) is _END:
                    found((following, node))
                elif following is not None and following not in seen:
                    seen.add(following)
                    to_visit.append(following)
        self.leaves: dict[int, Tensor] = {}
        self.parameters: list[Parameter] = []
        self.others: list[Tensor] = []  # leaves that are none
        for end, _ in self._ends:
            leaf = end.variable
            if id(leaf) not in self.leaves:
                self.leaves[id(leaf)] = leaf
                (self.parameters if isinstance(leaf, Parameter) else self.others).append(leaf)

    def users(self) -> Iterator[tuple[Any, int, Tensor]]:
        """Nodes with an edge to a leaf, and the number of that edge among theirs."""
        for node in dict.fromkeys(by for _, by in self._ends if by is not None):
            for number, (following, _) in enumerate(node.next_functions):
                if type(following) is _END:
                    yield node, number, following.variable

    @cached_property
    def uses(self) -> Counter[int]:
        """How many edges lead to each leaf, by its id."""
        return Counter(id(end.variable) for end, _ in self._ends)

    @cached_property
    def casts(self) -> dict[int, Tensor]:
        """Leaves of which a cast is used, by their id."""
        return {key: self.leaves[key] for key in self.cast_nodes}

    @cached_property
    def cast_nodes(self) -> dict[int, Any]:
        """The casts, by the id of the leaf."""
        return {id(end.variable): by for end, by in self._ends if type(by).__name__ == _CAST}


def is_cast(node: Any) -> bool:
    """Whether it is the cast of a tensor."""
    return type(node).__name__ == _CAST
