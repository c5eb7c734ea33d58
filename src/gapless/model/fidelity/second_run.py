"""Whether the second run of a forward does what the first has done, from the traces of both.

What a first run has made once and kept is a constant in the second, so constants are compared by their numbers:

    first    ones = ones(6)   x * ones      the tensor is made, and kept in an attribute
    second   x * kept                       it is there already
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty")


def same_graph(one: GraphModule, other: GraphModule, model: nn.Module) -> bool:
    """Whether two traces of a model compute the same."""
    owned = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return same_calls(_calls(one, owned), _calls(other, owned))


class Made:
    """A value that is computed: its place among them, or the name of a parameter."""

    def __init__(self, place: int | str) -> None:
        self.place = place


def same_calls(ours: list[list[Any]], theirs: list[list[Any]]) -> bool:
    """Of two graphs: what is called in order, each with the leaves of its arguments."""
    return len(ours) == len(theirs) and all(
        len(one) == len(other) and all(map(_equal, one, other)) for one, other in zip(ours, theirs, strict=True)
    )


def _calls(module: GraphModule, owned: set[str]) -> list[list[Any]]:
    """What is computed, in order, without what is constant: what is called, and with what."""
    known: dict[Node, Any] = {}
    found: list[list[Any]] = []
    for node in module.graph.nodes:
        if node.op == "call_module" or "assert" in str(node.target):
            continue  # torch's checks of sizes and types
        if node.op == "get_attr":
            name = str(node.target)
            value: Any = module
            for part in name.split("."):
                value = getattr(value, part)
            body = _calls(value, owned) if isinstance(value, GraphModule) else value
            known[node] = Made(name) if name in owned else body
        elif node.op == "call_function" and (made := _folded(node, known)) is not None:
            known[node] = made
        else:
            target = node.op if node.op == "placeholder" else node.target
            found.append([target, *pytree.tree_leaves(_filled((node.args, node.kwargs), known))])
            known[node] = Made(len(found))
    return found


def _filled(value: Any, known: Mapping[Node, Any]) -> Any:
    return pytree.tree_map(lambda each: known[each] if isinstance(each, Node) else each, value)


def _folded(node: Node, known: Mapping[Node, Any]) -> Tensor | None:
    """What a call makes of constants alone."""
    operator: Any = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in operator.tags or operator._schema.name.split("::")[1] in _EMPTY:
        return None
    if not all(isinstance(known[each], Tensor) for each in node.all_input_nodes):
        return None
    args, kwargs = _filled((node.args, node.kwargs), known)
    with torch.no_grad():
        made = operator(*args, **kwargs)
    return made if isinstance(made, Tensor) else None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Made) and isinstance(other, Made):
        return one.place == other.place
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (_kind(one) == _kind(other) and torch.equal(_bits(one), _bits(other)))
    if hasattr(one, "constants") and hasattr(other, "constants"):  # a function with a backward of its own
        return (one.__name__, one.constants) == (other.__name__, other.constants)
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # 0.0 is not -0.0
    return type(one) is type(other) and bool(one == other)


def _kind(tensor: Tensor) -> Any:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().flatten().contiguous().view(torch.uint8)
