"""A piece of a traced graph, as Python code that a stage can run like any other layer.

    trace     n0 n1 n2 | n3 n4 n5 n6 | n7 n8        nodes in the graph's order, cut in two places
    slot         0            1           2         a layer of the pipeline: one per stage, with one piece per trace
    crossing        (t, a, s)      (t, b, s)        the trace's number, then every value that is needed later

Parameters and buffers stay where they are, in the user's model: a piece looks them up by name whenever it runs, so the
optimizer, `state_dict` and hooks never notice. Calls that a stage answers itself (deferred weight gradients, seeded
draws) are written in the form its table knows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
Place = Callable[[int], None]
# What an export adds for itself.
_DROPPED = {aten._assert_tensor_metadata.default}


def _embedding(weight: Tensor, indices: Tensor, padding: int = -1, by_freq: bool = False, sparse: bool = False) -> Any:
    return F.embedding(indices, weight, None if padding == -1 else padding, None, 2.0, by_freq, sparse)


def _attention(*args: Any, **kwargs: Any) -> Any:
    return F.scaled_dot_product_attention(*args, **kwargs)


def _with_grad(enabled: bool, body: Callable[..., Any], *args: Any) -> Any:
    with torch.set_grad_enabled(enabled):
        return body(*args)


def _with_autocast(kind: str, dtype: Any, enabled: bool, cache: Any, body: Callable[..., Any], *args: Any) -> Any:
    # `cache` is off in every trace, because tracing switches it off; in the model it was on.
    with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=True):
        return body(*args)


def _convolutions() -> dict[Any, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = {}
    for dims in "123":
        forward, transposed = getattr(aten, f"conv{dims}d"), getattr(aten, f"conv_transpose{dims}d")
        for overload in (forward.default, forward.padding):
            table[overload] = getattr(torch, f"conv{dims}d")
        table[transposed.default if dims == "1" else transposed.input] = getattr(torch, f"conv_transpose{dims}d")
    return table


# The same operation, in the form in which a stage's table answers it.
PYTHON: dict[Any, Callable[..., Any]] = {
    aten.linear.default: F.linear,
    aten.matmul.default: torch.matmul,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.embedding.default: _embedding,
    aten.dropout.default: F.dropout,
    aten.scaled_dot_product_attention.default: _attention,
    aten.lstm.input: torch.lstm,
    aten.gru.input: torch.gru,
    aten.rnn_tanh.input: torch.rnn_tanh,
    aten.rnn_relu.input: torch.rnn_relu,
    aten.batch_norm.default: torch.batch_norm,
    torch.ops.higher_order.wrap_with_set_grad_enabled: _with_grad,
    torch.ops.higher_order.wrap_with_autocast: _with_autocast,
    **_convolutions(),
}


def draws(node: Node) -> bool:
    """Whether this call takes random numbers."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, str):
        return False
    if target is aten.dropout.default:
        return bool(node.args[2]) and bool(node.args[1])
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if PYTHON.get(target) in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
        return any(type(arg) is float and arg > 0.0 for arg in node.args)
    if PYTHON.get(target) in (_with_grad, _with_autocast):
        bodies = [body_of(arg) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        return any(draws(inner) for body in bodies if isinstance(body, GraphModule) for inner in body.graph.nodes)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def body_of(node: Node) -> Any:
    """What a get_attr node of a traced graph stands for."""
    owner: Any = node.graph.owning_module
    assert owner is not None
    return operator.attrgetter(str(node.target))(owner)


def _place(place: Place, number: int) -> None:
    place(number)


class Piece:
    """Consecutive nodes of one trace as one function, on one device."""

    def __init__(
        self,
        nodes: Sequence[Node],
        incoming: Sequence[Node],
        outgoing: Sequence[Node],
        *,
        model: nn.Module,
        numbers: dict[Node, int],
        end: int | None,
        moved: tuple[torch.device, torch.device] | None,
        result: tuple[Any, pytree.TreeSpec] | None,
    ) -> None:
        """`numbers` counts the random calls; `end` is their number, given to the last piece, whose `result` is the
        model's; `moved` says which device in the trace is which one here.
        """
        graph = Graph()
        place = graph.placeholder("place")
        values: dict[Node, Node] = {node: graph.placeholder(node.name) for node in incoming}
        self._homes: list[tuple[Any, str]] = []
        used = {arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr"}
        used |= {node for node in outgoing if node.op == "get_attr"}
        for node in sorted(used):
            values[node] = graph.placeholder(node.name)
            self._homes.append(_home(model, node))
        for node in nodes:
            if node in numbers:
                graph.call_function(_place, (place, numbers[node]))
            copy = graph.node_copy(node, values.__getitem__)
            copy.target = PYTHON.get(node.target, node.target)
            copy.meta = {}
            if moved is not None:
                copy.args, copy.kwargs = _moved((copy.args, copy.kwargs), moved)
            values[node] = copy
        if end is not None:
            graph.call_function(_place, (place, end))
        kept = outgoing if result is None else result[0]
        graph.output(torch.fx.map_arg(kept, values.__getitem__))
        self._spec = None if result is None else result[1]
        self._module = GraphModule({}, graph)
        self._run: Callable[..., Any] = self._module.forward
        self._device = None if moved is None else moved[1]

    def __call__(self, place: Place, values: Sequence[Any]) -> Any:
        held = [getattr(owner, name) for owner, name in self._homes]
        if self._device is not None:
            held = [
                value.to(self._device) if isinstance(value, Tensor) and type(value) is not nn.Parameter else value
                for value in held
            ]
        out = self._run(place, *values, *held)
        return tuple(out) if self._spec is None else pytree.tree_unflatten(out, self._spec)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those it uses, with a name."""
        for number, (owner, name) in enumerate(self._homes):
            value = getattr(owner, name)
            if isinstance(value, nn.Parameter):
                yield f"{number}.{name}", value

    def buffers(self) -> Iterator[tuple[nn.Module, str]]:
        """Where the buffers that it uses are."""
        for owner, name in self._homes:
            if isinstance(owner, nn.Module) and name in owner._buffers:
                yield owner, name


def _home(model: nn.Module, node: Node) -> tuple[Any, str]:
    """The owner of a parameter or buffer in the user's model, or of a constant in the trace."""
    path, _, name = str(node.target).rpartition(".")
    traced: Any = node.graph.owning_module
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return traced.get_submodule(path), name
    return (owner if name in owner._parameters or name in owner._buffers else traced.get_submodule(path)), name


def _moved(tree: Any, moved: tuple[torch.device, torch.device]) -> Any:
    source, target = moved

    def change(leaf: Any) -> Any:
        return target if isinstance(leaf, torch.device) and leaf == source else leaf

    return pytree.tree_map(change, tree)


def kept_nodes(graph: Graph) -> list[Node]:
    """The nodes that compute something."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target not in _DROPPED]


class Slot(nn.Module):
    """A stage's place in every trace: the one layer of that stage."""

    counts_draws = True

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.place: Place = _nowhere

    def forward(self, crossing: tuple[Any, ...]) -> Any:
        trace, *values = crossing
        piece = self.pieces[trace]
        out = piece(self.place, values)
        return out if piece._spec is not None else (trace, *out)

    def settle(self, device: torch.device) -> None:
        """Brings parameters and buffers to the device; `.to` would give the model buffers of its own."""
        for piece in self.pieces:
            for _, parameter in piece.parameters():
                if parameter.device != device:
                    parameter.data = parameter.data.to(device)
                    if parameter.grad is not None:
                        parameter.grad.data = parameter.grad.data.to(device)
            for owner, name in piece.buffers():
                owner._buffers[name] = owner._buffers[name].to(device)  # type: ignore[union-attr]

    def modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[nn.Module]:  # type: ignore[override]
        """Itself, and the modules whose buffers it uses: a stage looks for batch norms among them."""
        yield self
        yield from dict.fromkeys(owner for piece in self.pieces for owner, _ in piece.buffers())

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[nn.Parameter] = set()
        for piece in self.pieces:
            for name, parameter in piece.parameters():
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter


def _nowhere(_: int) -> None:
    """Nobody draws, or nobody asks from where."""
