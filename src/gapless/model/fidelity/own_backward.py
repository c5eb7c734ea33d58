"""Functions with a backward of their own (torch.autograd.Function) in a trace.

A trace would keep the calls of the forward and lose the backward. So it is marked where the forward begins and ends,
and what lies between is replaced by the one call that a user makes, which a piece makes again:

    traced     linear  [begin  round  mul  end]  linear
    in pieces  linear   Rounded.apply            linear
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule, Node
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree

from gapless.model.traced.operators import draws, uncompiled

from .thread_patches import instead
from .untraceable import LostError

_OF_OPERATORS = "torch._library.autograd"  # an operator's own backward stays with it, and the operator is in the graph
_SIZES = (torch.SymInt,)


@torch.library.custom_op("gapless::own_backward_begins", mutates_args=())
def _begins(tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty(0)


@torch.library.custom_op("gapless::own_backward_ends", mutates_args=())
def _ends(
    begun: Tensor, tensors: Sequence[Tensor], sizes: Sequence[int], results: Sequence[Tensor], number: int
) -> list[Tensor]:
    return [each.clone() for each in results]


_begins.register_fake(lambda tensors: tensors[0].new_empty(0))
_ends.register_fake(
    lambda begun, tensors, sizes, results, number: [
        each.new_empty_strided(each.shape, each.stride()) for each in results
    ]
)


class OwnBackwards:
    """The functions that a forward has called while it was traced."""

    def __init__(self) -> None:
        self._runs: list[Callable[..., Any]] = []
        self._inside = 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While it holds, what this thread calls is marked."""
        with (
            instead(torch.autograd.Function, "apply", self._marked),
            instead(BackwardCFunction, "__init__", self._noticed),
        ):
            yield

    def _noticed(self, original: Any, context: Any, *args: Any, **kwargs: Any) -> None:
        """Torch makes the context of every call, also of one through a name that was bound to `apply` before."""
        of = context._forward_cls
        if of is BackwardHookFunction:
            raise LostError("a backward hook of a module, which a trace would lose")
        if not self._inside and of.__module__ != _OF_OPERATORS:
            raise LostError(
                f"the forward of {of.__name__}, whose own backward a trace would lose since its apply was bound to "
                f"another name before: call it as {of.__name__}.apply"
            )
        original(context, *args, **kwargs)

    def _marked(self, original: Any, of: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside or of.__module__ == _OF_OPERATORS or of is BackwardHookFunction:
            return original(of, *args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [leaf for leaf in leaves if isinstance(leaf, _SIZES)]
        if not tensors or any(isinstance(leaf, torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise LostError(f"{of.__name__}.apply without a tensor or with a number that depends on sizes")
        versions = [tensor._version for tensor in tensors]
        begun = torch.ops.gapless.own_backward_begins(tensors)
        self._inside += 1
        try:
            made = original(of, *args, **kwargs)
        finally:
            self._inside -= 1
        if versions != [tensor._version for tensor in tensors]:
            raise LostError(f"{of.__name__}.apply, which changes its arguments in place")
        results, made_spec = pytree.tree_flatten(made)
        places = [place for place, leaf in enumerate(results) if isinstance(leaf, Tensor)]
        given = [results[place] for place in places]
        self._runs.append(_run(of, leaves, spec))
        ended = torch.ops.gapless.own_backward_ends(begun, tensors, sizes, given, len(self._runs) - 1)
        for place, tensor in zip(places, ended, strict=True):
            results[place] = tensor
        return pytree.tree_unflatten(results, made_spec)

    def put_back(self, module: GraphModule, model: nn.Module) -> None:
        """The calls in place of what was marked, in all parts of a trace."""
        if not self._runs:
            return
        owned = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        for body in module.modules():
            if isinstance(body, GraphModule):
                for node in list(body.graph.nodes):
                    if node.target is torch.ops.gapless.own_backward_ends.default:
                        self._replace(node, owned)
                body.recompile()

    def _replace(self, node: Node, owned: set[str]) -> None:
        begun, tensors, sizes, results, number = node.args
        run: Any = self._runs[number]  # type: ignore[index]
        inside, each = list[Node](), node.prev
        while each is not begun:
            inside.append(each)
            each = each.prev
        if any(draws(each) for each in inside):
            raise LostError(f"{run.__name__}.apply, whose forward draws random numbers that no stage can seed")
        known = {begun, *inside, *tensors}  # type: ignore[misc]
        for other in (other for each in inside for other in each.all_input_nodes if other not in known):
            if isinstance(other.meta.get("val"), Tensor) and (other.op != "get_attr" or str(other.target) in owned):
                raise LostError(
                    f"{run.__name__}.apply, whose forward uses a tensor that it is not given ({other.name})"
                )
        values = [each.meta.get("val") for each in results]  # type: ignore[union-attr]  # views are known as such
        node.target, node.args, node.meta["val"] = run, (tensors, sizes), values
        for part in node.users:
            part.meta["val"] = values[part.args[1]]  # type: ignore[index]
        for each in (*inside, begun):
            if not each.users:
                node.graph.erase_node(each)


def _run(of: Any, leaves: Sequence[Any], spec: pytree.TreeSpec) -> Callable[..., Any]:
    """The call, given its tensors and those of its numbers that are sizes."""
    kinds = [Tensor if isinstance(leaf, Tensor) else int if isinstance(leaf, _SIZES) else None for leaf in leaves]
    constants = [None if kind else leaf for kind, leaf in zip(kinds, leaves, strict=True)]

    def run(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        left = {Tensor: iter(tensors), int: iter(sizes)}
        filled = [
            constant if kind is None else next(left[kind]) for kind, constant in zip(kinds, constants, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        made = of.apply(*args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]

    run.__name__ = of.__name__  # by which a graph is known
    run.constants = [of, *constants]  # type: ignore[attr-defined]
    return uncompiled(run)
