"""The backward of a region that torch.compile has made, in two parts, each compiled by the region's own backend.

    backward graph    grad --- mm(grad, w) --- input gradient
                          \\--- mm(grad', x) --- cast --- weight gradient
    I                 all but the last products before weight gradients; what these need is a result too
    W                 these products, and what comes after them

Sums for biases and norms stay in I, in the kernels that have their terms at hand, and so does what is recomputed. So W
starts from tensors that an uncut backward has in memory too, and the bits stay the same.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.nn import Parameter

from gapless.guards.weights_and_gradients import SAVED_TENSORS
from gapless.stage.random.draws import draws_by_tag

from .deferred import given, recording

NODE = "CompiledFunctionBackward"  # autograd's node for a region
_aten = torch.ops.aten
_CONVOLUTION = _aten.convolution_backward
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten._scaled_mm, _aten._grouped_mm, _CONVOLUTION)


@dataclasses.dataclass
class Cutting:
    """A backend for torch.compile: another one, of whose backward graphs both parts are compiled."""

    backend: Callable[..., Any]

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Any:
        if getattr(self.backend, "config", {}).get("triton.cudagraphs"):  # the next run writes over what W needs
            return self.backend(graph, inputs)
        common: Any = torch._dynamo.backends.common
        original = common.aot_module_simplified  # by which every backend gets its graphs

        def simplified(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
            kinds = [next((kind for kind in (Parameter, Tensor) if isinstance(each, kind)), None) for each in inputs]
            compiler = functools.partial(_cut, options.pop("bw_compiler"), kinds)
            return original(module, inputs, bw_compiler=compiler, **options)

        # I may write into a donated buffer that W needs; what was cached on disk is in one part.
        config = torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False)
        with torch._dynamo.convert_frame.compile_lock, config:
            common.aot_module_simplified = simplified
            try:
                return self.backend(graph, inputs)
            finally:
                common.aot_module_simplified = original


def _cut(compiler: Callable[..., Any], kinds: Sequence[Any], module: GraphModule, args: Sequence[Any]) -> Any:
    """Compiles a backward graph, which has a gradient for each input of the region; those are of these kinds."""
    graph = module.graph
    output = next(iter(graph.find_nodes(op="output")))
    grads: list[Any] = list(output.args[0])
    if len(grads) != len(kinds):
        return compiler(module, args)
    _part_convolutions(graph)
    late = _late(graph, [grad for grad, kind in zip(grads, kinds, strict=True) if kind is Tensor and grad is not None])
    last = [k for k, grad in enumerate(grads) if grad in late]
    needed = dict.fromkeys(arg for node in late for arg in node.all_input_nodes if arg not in late)
    held = {k: node for k, node in enumerate(graph.find_nodes(op="placeholder")) if node in needed}
    made = [node for node in needed if node.op != "placeholder"]
    values = [*(args[k] for k in held), *(node.meta["val"] for node in made)]
    weights, copies = Graph(), dict[Node, Node]()
    for node, value in zip((*held.values(), *made), values, strict=True):
        copies[node] = weights.placeholder(f"needed_{len(copies)}")
        copies[node].meta["val"] = value
    for node in late:
        copies[node] = weights.node_copy(node, copies.__getitem__)
    weights.output(tuple(copies[grads[k]] for k in last))
    output.args = ((*(None if k in last else grad for k, grad in enumerate(grads)), *made),)
    for node in reversed(late):
        graph.erase_node(node)
    module.recompile()
    first = compiler(module, args)
    return Region(first, compiler(GraphModule(module, weights), values) if last else None, [*held], last, kinds)


def _part_convolutions(graph: Graph) -> None:
    """One call for the gradient of the input, and one for those of weight and bias."""
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION.default):
        *args, mask = node.args
        if mask[0] and mask[1]:
            with graph.inserting_before(node):
                other = graph.node_copy(node)
            node.args, other.args = (*args, [True, False, False]), (*args, [False, *mask[1:]])
            value = node.meta["val"]
            node.meta["val"], other.meta["val"] = (value[0], None, None), (None, *value[1:])
            for user in [each for each in node.users if each.args[1] != 0]:
                user.args = (other, user.args[1])


def _late(graph: Graph, others: Iterable[Node]) -> list[Node]:
    """The last products before weight gradients, and what comes after them; none that the `others` need. Nothing where
    something is changed in place, or where more comes after products than plain operators.
    """
    products = {node for node in graph.nodes if getattr(node.target, "overloadpacket", None) in _PRODUCTS}
    products -= _before(others) | _before(arg for node in products for arg in node.all_input_nodes)
    late: dict[Node, None] = {}
    for node in graph.nodes:
        is_operator = isinstance(node.target, OpOverload)
        if is_operator and node.target._schema.is_mutable:
            return []
        if node.op == "call_function" and (node in products or any(arg in late for arg in node.all_input_nodes)):
            is_plain = node.target is operator.getitem or (is_operator and not draws_by_tag(node.target))
            if not is_plain or any("val" not in arg.meta for arg in node.all_input_nodes):
                return []
            late[node] = None
    return [*late]


def _before(nodes: Iterable[Node]) -> set[Node]:
    """These nodes, and all that they need."""
    found, waiting = set[Node](), [*nodes]
    while waiting:
        if (node := waiting.pop()) not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


@dataclasses.dataclass
class Region:
    """The compiled backward of a region with inputs of these kinds. `second` is W: from the arguments `held`, and from
    what `first` gives beside the gradients, it makes the gradients `last`.
    """

    first: Callable[..., Any]
    second: Callable[..., Any] | None
    held: Sequence[int]
    last: Sequence[int]
    kinds: Sequence[Any]
    _boxed_call = True

    def __call__(self, args: list[Any]) -> list[Any]:
        needed = [args[k] for k in self.held]
        results = [*_run(self.first, args)]
        grads, needed = results[: len(self.kinds)], [*needed, *results[len(self.kinds) :]]
        records = recording.now()
        leaves = {} if records is None or not records.sole else self._leaves(records.sole)
        waits = all(k in leaves for k in self.last)
        if not waits:
            for k, grad in zip(self.last, _run(self.second, needed), strict=True):
                grads[k] = grad
        later = _Later(self, needed)
        for k, leaf in leaves.items():
            waited = records.sole[id(leaf)]  # type: ignore[union-attr]
            if waits and k in self.last:
                waited.add(id(leaf))
                records.append((leaf, later.grad, k, None, False))  # type: ignore[union-attr]
            elif id(leaf) in waited and grads[k] is not None:  # what other microbatches have deferred comes before
                records.append((leaf, given, grads[k], None, False))  # type: ignore[union-attr]
                grads[k] = None
        return grads

    def _leaves(self, sole: Collection[int]) -> dict[int, Parameter]:
        """Those of the parameters that this backward runs for, by their place among the inputs."""
        places = [k for k, kind in enumerate(self.kinds) if kind is not None]
        functions = torch._C._current_autograd_node().next_functions
        if len(functions) != len(places):
            return {}
        leaves = {k: getattr(function, "variable", None) for k, (function, _) in zip(places, functions, strict=True)}
        return {k: leaf for k, leaf in leaves.items() if type(leaf) is Parameter and id(leaf) in sole}


class _Later:
    """W of one microbatch: it runs when the first of its gradients is asked for."""

    def __init__(self, region: Region, needed: list[Any]) -> None:
        self._region, self._needed, self._versions = region, needed, _versions(needed)
        self._grads: dict[int, Tensor] = {}

    def grad(self, k: int, _: Any) -> Tensor:
        """That of input `k`."""
        if not self._grads:
            if _versions(self._needed) != self._versions:
                raise SAVED_TENSORS.refusal(
                    "a weight gradient of a compiled layer was deferred, and a tensor that it needs was changed in "
                    "place meanwhile, most likely a buffer that the forward of a later microbatch has changed"
                )
            storages: set[int] = set()
            for last, grad in zip(self._region.last, _run(self._region.second, self._needed), strict=True):
                is_shared = (key := grad.untyped_storage().data_ptr()) in storages
                storages.add(key)
                self._grads[last] = grad.clone() if is_shared else grad
            self._needed.clear()
        return self._grads.pop(k)


def _versions(values: Sequence[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


def _run(function: Any, args: list[Any]) -> Any:
    return function(args) if getattr(function, "_boxed_call", False) else function(*args)
