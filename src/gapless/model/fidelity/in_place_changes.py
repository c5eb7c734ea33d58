"""What a traced graph changes in place, and where it therefore must not be cut.

A tensor that is a view shares its memory with others, so changes are followed through memory: the tensors without data
that the export ran the model on say which values lie in the same.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from gapless.model.traced.operators import PYTHON
from gapless.model.traced.trace import Trace

_ATEN = torch.ops.aten
# Whether these copy is up to the strides that the kernel before has chosen, and kernels differ: they count as views.
_VIEW_OR_COPY = {_ATEN.contiguous.default, _ATEN.reshape.default, _ATEN.flatten.using_ints}


def tensors_of(value: Any) -> Iterable[Tensor]:
    """Those in the value of a node."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_of(part)


def _written(node: Node) -> list[Node]:
    """The arguments that a node changes in place."""
    if PYTHON.get(node.target) is torch.batch_norm:
        return [arg for arg in node.args[3:5] if isinstance(arg, Node)] if node.args[5] else []
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[Node] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
            written += [arg for arg in (given if isinstance(given, list | tuple) else [given]) if isinstance(arg, Node)]
    return written


def unbroken(trace: Trace, index: dict[Node, int]) -> list[tuple[int, int]]:
    """Stretches of positions without a cut: (from, up to)."""
    stretches = _vmapped(trace)
    writes = [(index[node], target) for node in trace.nodes for target in _written(node)]
    if not writes:
        return stretches
    memory = _memory(trace)
    ends: dict[Any, int] = {}
    for number, target in writes:
        for place in memory.get(target, ()):
            ends[place] = max(ends.get(place, -1), number)
    for place, end in ends.items():
        holders = [node for node, places in memory.items() if place in places and node.op != "output"]
        if any(node.op == "get_attr" for node in holders):
            uses = [index[user] for node in holders for user in node.users if user in index]
            stretches.append((min(uses), max(uses)))
        else:
            stretches.append((min(index.get(node, -1) for node in holders), end))
    return stretches


def changed_buffers(trace: Trace) -> list[str]:
    """The names of buffers and constants that a graph changes in place."""
    writes = [target for node in trace.nodes for target in _written(node)]
    memory = _memory(trace) if writes else {}
    places = {place for target in writes for place in memory.get(target, ())}
    return [str(node.target) for node, own in memory.items() if node.op == "get_attr" and own & places]


def _vmapped(trace: Trace) -> list[tuple[int, int]]:
    """What torch.vmap runs: between its begin and its end tensors have a dimension that can't be seen elsewhere."""
    stretches, start, depth = [], 0, 0
    for number, node in enumerate(trace.nodes):
        name = getattr(node.target, "__name__", "")
        if name == "_vmap_increment_nesting":
            start, depth = number if depth == 0 else start, depth + 1
        elif name == "_vmap_decrement_nesting":
            depth -= 1
            if depth == 0:
                stretches.append((start, number))
    return stretches


def _memory(trace: Trace) -> dict[Node, set[int]]:
    """In which memory every value lies. The tensors without data that the export has left at its nodes share memory as
    the values do; what has none left there is no tensor: a part of the graph, a switch.
    """
    same: dict[int, int] = {}

    def place(storage: int) -> int:
        while storage in same:
            storage = same[storage]
        return storage

    storages = {
        node: {tensor.untyped_storage()._cdata for tensor in tensors_of(node.meta.get("val"))}
        for node in trace.graph.nodes
    }
    for node in trace.nodes:
        if node.target in _VIEW_OR_COPY:
            first, *others = sorted({place(each) for value in (node, node.args[0]) for each in storages[value]})
            same.update(dict.fromkeys(others, first))
    return {node: {place(each) for each in each_of} for node, each_of in storages.items()}
