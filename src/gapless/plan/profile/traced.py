"""A module that is no sequence, as layers to measure: its graph, cut where little crosses into pieces of about the same
cost.

The layers hold the tensors of the caller's model, and copies of them are measured. The model is traced without memory.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise, takewhile
from types import MethodType
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.fx import Node

from gapless.model.materialise import named_tensors
from gapless.model.traced.capture import flat_of, pieces_of
from gapless.model.traced.crossing import Crossing, even_cuts, homes_of
from gapless.model.traced.graph_cuts import GraphCuts
from gapless.model.traced.hollow import hollow
from gapless.model.traced.piece import GraphLayer, Piece
from gapless.model.traced.trace import Trace
from gapless.plan.profile.task import moved

_MOST = 48  # layers, or
_PER_DEVICE = 4


class TracedLayer(GraphLayer):
    """A piece of a graph that is copied and moved as any other layer."""

    def __init__(self, piece: Piece) -> None:
        super().__init__()
        piece, self.held = piece.apart()
        self.pieces = [piece]

    def bind(self, *functions: Any, exclude: Any = None, **options: Any) -> None:
        """It does not hold the stage that holds it, so that the memory of both goes as soon as it was measured."""
        super().bind(*map(_weak, functions), exclude=_weak(exclude), **options)


def _weak(function: Any) -> Any:
    if not isinstance(function, MethodType):
        return function
    method = WeakMethod(function)
    return lambda *args: method()(*args)  # type: ignore[misc]


class Graph:
    """The layers of a model for one kind of microbatch, with their names."""

    def __init__(self, model: nn.Module, crossing: Crossing, places: Sequence[int]) -> None:
        """`places`: the positions after which it is cut."""
        self.trace = trace = crossing.trace
        self._model, self._crossing, self._places = model, crossing, places
        pieces = pieces_of(self._crossing, self._places, model, [None] * (len(self._places) + 1))
        self.layers = [TracedLayer(piece) for piece in pieces]
        bounds = [0, *(place + 1 for place in self._places), len(trace.nodes)]
        self.names = [self._name(range(start, end)) for start, end in pairwise(bounds)]

    def cuts(self, partition: Sequence[int]) -> GraphCuts:
        """Where a plan with so many layers per stage cuts this graph."""
        after = tuple(self._places[count - 1] for count in accumulate(partition[:-1]))
        homes = homes_of(self._crossing, after)
        known = [name for name, _ in named_tensors(self._model) if name in homes]
        parameters = tuple(tuple(name for name in known if stage in homes[name]) for stage in range(len(partition)))
        return GraphCuts(after, len(self.trace.nodes), parameters)

    def _name(self, numbers: range) -> str:
        """The module that has all of these nodes, or else the costliest."""
        costs = self._crossing.costs
        paths = {number: _path(self.trace.nodes[number]) for number in numbers if costs[number]}
        same = takewhile(lambda names: len(set(names)) == 1, zip(*paths.values(), strict=False))
        path = [names[0] for names in same] or paths.get(max(numbers, key=costs.__getitem__, default=0), [])
        return ".".join(path) or type(self._model).__name__


def modules_of(node: Node) -> list[str]:
    """The paths of the modules in whose forward a node is, from the outermost."""
    return [str(path).partition("@")[0] for path, _ in node.meta.get("nn_module_stack", {}).values()]


def _path(node: Node) -> list[str]:
    """The names that lead to the module that a node is of."""
    paths = modules_of(node)
    return [name for name in paths[-1].split(".") if name] if paths else []


class Tracer:
    """Traces a model once for each kind of microbatch, on the device that is measured."""

    def __init__(self, model: nn.Module, device: torch.device, num_devices: int) -> None:
        self._model, self._device = model, device
        self._most = max(_MOST, _PER_DEVICE * num_devices)
        self._graphs: list[Graph] = []

    def graph(self, part: Any) -> tuple[Graph, Any]:
        """Its layers for this microbatch, and what the first of them takes."""
        flat, spec = flat_of(moved(part, self._device))
        inputs = ((0, *flat),)
        for known in self._graphs:
            if known.trace.fits(flat, spec):
                return known, inputs
        with hollow(self._model, self._device):  # the memory of a GPU is for what is measured
            trace = Trace(self._model, flat, spec)
        crossing = Crossing(trace)
        made = Graph(self._model, crossing, even_cuts(crossing, self._most))
        self._graphs.append(made)
        return made, inputs
