"""The operators of a traced graph, in the form in which a stage answers them.

A stage answers some calls itself: draws are seeded, heavy weight gradients may wait, batch norm counts. Its table knows
the functions that people write; a trace has the operators below them. This file leads back, operation by operation.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from gapless.stage.auxiliary import aux_loss
from gapless.stage.norm.batchnorm_calls import checkpointed, checkpointed_count
from gapless.stage.random.random_calls import RECURRENT

from .grouped import run_grouped_mm

aten = torch.ops.aten
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
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
    **{getattr(aten, each.__name__).input: each for each in RECURRENT},
    aten.batch_norm.default: torch.batch_norm,
    torch.ops.gapless.aux_loss.default: aux_loss,
    torch.ops.gapless.grouped_mm.default: run_grouped_mm,
    torch.ops.higher_order.wrap_with_set_grad_enabled: _with_grad,
    torch.ops.higher_order.wrap_with_autocast: _with_autocast,
    **_convolutions(),
}

# Operators for which people have functions too, which torch calls in two thirds of the time.
_FUNCTIONS: dict[Any, str] = {
    torch: "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default pow.Tensor_Scalar mean.dim rsqrt.default "
    "cat.default transpose.int unsqueeze.default reshape.default permute.default select.int tanh.default relu.default "
    "sigmoid.default softmax.int layer_norm.default cos.default sin.default chunk.default",
    torch._C._nn: "silu.default gelu.default",
    Tensor: "view.default expand.default contiguous.default to.dtype type_as.default",
}
FUNCTIONS = {
    getattr(getattr(aten, name), overload): getattr(home, name)
    for home, names in _FUNCTIONS.items()
    for name, overload in (each.split(".") for each in names.split())
}


def as_function(node: Node) -> None:
    """Makes the call of an operator that of a function, if there is one for it."""
    if node.target is aten.slice.Tensor and len(node.args) > 1:
        tensor, dim, *bounds = node.args
        assert isinstance(dim, int)
        part, others = slice(*(*bounds, None, None, None)[:3]), [slice(None)] * (dim if dim >= 0 else -dim - 1)
        index: Any = (*others, part) if dim >= 0 else (..., part, *others)
        node.target, node.args = operator.getitem, (tensor, index)
    else:
        node.target = FUNCTIONS.get(node.target, node.target)


def draws(node: Node) -> bool:
    """Whether this call takes random numbers."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, str):
        return False
    if target is aten.dropout.default:
        return bool(node.args[2]) and bool(node.args[1])
    if target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if PYTHON.get(target) in RECURRENT:
        return any(type(arg) is float and arg > 0.0 for arg in node.args)
    if PYTHON.get(target) in WRAPPING:
        bodies = [body_of(arg) for arg in node.args if isinstance(arg, Node) and arg.op == "get_attr"]
        return any(draws(inner) for body in bodies if isinstance(body, GraphModule) for inner in body.graph.nodes)
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def body_of(node: Node) -> Any:
    """What a get_attr node of a traced graph stands for."""
    owner: Any = node.graph.owning_module
    assert owner is not None
    return operator.attrgetter(str(node.target))(owner)


# Calls whose weight gradients can wait.
_HEAVY = (F.linear, torch.matmul, torch.mm, torch.addmm, F.embedding, *_convolutions().values())
_KNOWN: dict[Any, Any] = {_embedding: F.embedding, _attention: F.scaled_dot_product_attention}
COUNTING = (torch.batch_norm, checkpointed, checkpointed_count, aten.add_.Tensor)
WRAPPING = (_with_grad, _with_autocast)  # calls that are given the body they run
_UNCOMPILED = {*WRAPPING, aux_loss}


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, marked as one that is called as it is in a compiled piece."""
    function.is_uncompiled = True  # type: ignore[attr-defined]
    return function


def is_uncompiled(function: Any) -> bool:
    """Whether a compiled piece calls it as it is."""
    return function in _UNCOMPILED or getattr(function, "is_uncompiled", False)


def is_heavy(node: Node) -> bool:
    """Whether its weight gradient can wait."""
    target: Any = PYTHON.get(node.target, node.target)
    return _KNOWN.get(target, target) in _HEAVY


def answered(function: Any) -> Callable[..., Any]:
    """The call as one that the stage answers."""
    known = _KNOWN.get(function, function)

    def call(answer: Answer, *args: Any, **kwargs: Any) -> Any:
        return answer(known, args, kwargs)

    def embedding(answer: Answer, weight: Any, indices: Any, padding: int = -1, *rest: Any, **kwargs: Any) -> Any:
        return answer(F.embedding, (indices, weight, None if padding == -1 else padding, None, 2.0, *rest), kwargs)

    return embedding if known is F.embedding else call


def needed(starts: Iterable[Node]) -> set[Node]:
    """These nodes and everything that leads to them."""
    found: set[Node] = set()
    left = list(starts)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def kept_nodes(graph: Graph) -> list[Node]:
    """The nodes that compute something."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target not in _DROPPED]


_OF_CUDNN = ("cudnn_enabled", "cudnn_enable")


def as_called_plainly(module: GraphModule) -> None:
    """What an export adds for itself goes from the bodies of higher-order calls too: a stage may be on another device
    than the trace. And it traces with cuDNN off, which it writes into calls that take that as an argument.
    """
    for body in module.modules():
        if not isinstance(body, GraphModule):
            continue
        for node in body.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for place, argument in enumerate(schema.arguments if schema is not None else ()):
                if argument.name in _OF_CUDNN and place < len(node.args):
                    node.update_arg(place, torch.backends.cudnn.enabled)
        if body is not module:
            for node in [node for node in body.graph.nodes if node.target in _DROPPED]:
                body.graph.erase_node(node)
            body.recompile()
