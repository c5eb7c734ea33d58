"""What a traced graph changes in place, and where it therefore must not be cut.

A tensor that is a view shares its memory with others, so changes are followed through memory: the graph is run once on
tensors without data, and values that lie in the same memory are one.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Interpreter, Node

from .operators import PYTHON
from .trace import Trace


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


class _Memory(Interpreter):
    """Runs a graph on tensors without data and notes in which memory every value lies."""

    def __init__(self, trace: Trace, fake: FakeTensorMode) -> None:
        super().__init__(trace.module)
        self._fake = fake
        self._attrs: dict[str, Any] = {}
        self.places: dict[Node, set[int]] = {}
        self._alive: list[Any] = []  # so that no address comes twice

    def run_node(self, n: Node) -> Any:
        if n.op == "call_module":
            return None
        value = super().run_node(n)
        self._alive.append(value)
        self.places[n] = {tensor.untyped_storage()._cdata for tensor in tensors_of(value)}
        return value

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            if target not in self._attrs:
                self._attrs[target] = self._fake.from_tensor(value.detach())
            return self._attrs[target]
        return value


def _memory(trace: Trace) -> dict[Node, set[int]]:
    modes = [val.fake_mode for node in trace.inputs if isinstance(val := node.meta.get("val"), FakeTensor)]
    fake = modes[0] if modes else FakeTensorMode()
    runner = _Memory(trace, fake)
    with fake, torch.no_grad(), enable_python_dispatcher():  # torch's own kernels may ask for sizes that are symbols
        runner.run(*[node.meta.get("val") for node in trace.inputs], enable_io_processing=False)
    return runner.places
