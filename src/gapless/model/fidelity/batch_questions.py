"""Questions that a model asks of its batch: `if mask.all(): ...`.

A graph has no branches, so a trace needs the answer when it is made. Where it depends on the batch alone, it is
computed from the real batch, as Python would, and kept: the trace holds for every microbatch with the same answers.
Hugging Face's attention asks in this way whether there is any padding, and takes another kernel where there is none.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from gapless.model.traced.operators import needed

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchQuestion:
    """What was asked, as a function of some of the batch's leaves, and what was answered; `of_data`, unless the answer
    depends on sizes alone.
    """

    ask: Callable[..., Any]
    leaves: tuple[int, ...]
    of_data: bool
    answer: bool

    def same(self, flat: Sequence[Any]) -> bool:
        """Whether this batch gives the same answer."""
        return bool(self.ask(*(flat[leaf] for leaf in self.leaves))) == self.answer


class Questions(TorchFunctionMode):
    """While it is on, what a traced model asks of its batch is answered from the real one, `flat`."""

    def __init__(self, flat: Sequence[Any]) -> None:
        super().__init__()
        self._flat = flat
        self.asked: list[BatchQuestion] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__contains__:  # `pad in ids`, which asks in a way that no mode sees
            with self:
                return bool((args[0] == args[1]).any())
        if func is Tensor.__bool__ or (func is Tensor.item and args[0].dtype is torch.bool):
            answer = self._answer(args[0])
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))

    def _answer(self, tensor: Tensor) -> bool | None:
        """None where it depends on more than the batch: weights, or numbers that are still to be drawn."""
        node, mode = _node_of(tensor), proxy_tensor.get_proxy_mode()
        if node is None or mode is None:
            return None
        root: Any = mode.tracer.root  # type: ignore[union-attr]
        origins = needed([node])
        while not origins.issuperset(changes := _changes(node.graph, origins)):
            origins |= needed(changes)
        nodes = [each for each in node.graph.nodes if each in origins]
        if any(torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ()) for each in nodes):
            return _certain(node)
        placeholders = [each for each in node.graph.nodes if each.op == "placeholder"]
        place = {each: number for number, each in enumerate(placeholders[-len(self._flat) :])}
        literals = {each: getattr(root, str(each.target)) for each in nodes if _is_literal(each)}
        given = [each for each in nodes if each.op != "call_function" and each not in literals]
        # What writes into the batch itself would do so again whenever it is asked.
        if any(each not in place for each in given) or _changes(node.graph, set(given)):
            return None
        leaves = tuple(place[each] for each in given)
        # In a thread of its own, since this one traces whatever it computes.
        with ThreadPoolExecutor(1) as apart:
            question = apart.submit(_asked, node, nodes, given, literals, leaves, self._flat).result()
        self.asked.append(question)
        return question.answer


def _node_of(tensor: Tensor) -> Node | None:
    mode = proxy_tensor.get_proxy_mode()
    proxy: Any = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if proxy is None else proxy.proxy.node


def _made_by(tensor: Tensor) -> list[Node] | None:
    """The calls of a trace that have made it, sizes of the batch left out; None if it is no tensor of a trace."""
    made = _node_of(tensor)
    if made is None:
        return None
    found, to_visit = dict[Node, None](), [made]
    while to_visit:
        node = to_visit.pop()
        if node not in found and node.target is not aten.sym_size.int:
            found[node] = None
            to_visit += node.all_input_nodes
    return [node for node in made.graph.nodes if node in found]


def depends_on_data(tensor: Tensor) -> bool:
    """Whether what a traced model has made is up to its batch, its weights or random numbers, but for sizes."""
    nodes = _made_by(tensor)
    if not nodes:
        return tensor.requires_grad
    draws = any(torch.Tag.nondeterministic_seeded in getattr(each.target, "tags", ()) for each in nodes)
    return draws or any(each.op == "placeholder" for each in nodes) or bool(_changes(nodes[0].graph, set(nodes)))


def constant(tensor: Tensor) -> Tensor | None:
    """The numbers of one that does not depend on data; None where sizes that vary are needed for them."""
    nodes = _made_by(tensor)
    if nodes is None:
        return tensor
    known = set(nodes)
    if any(each.op != "call_function" or not known.issuperset(each.all_input_nodes) for each in nodes):
        return None
    graph = Graph()
    values: dict[Node, Node] = {}
    for node in nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    graph.output(values[nodes[-1]])
    with ThreadPoolExecutor(1) as apart:  # since this one traces whatever it computes
        made: Tensor = apart.submit(GraphModule({}, graph).forward).result()
    return made


def _is_literal(node: Node) -> bool:
    """Whether it is a number of the code, as 1 in `mask[rows, ends] = 1`, which each use copies."""
    return node.op == "get_attr" and all(user.target is aten.lift_fresh_copy.default for user in node.users)


def _changes(graph: Graph, nodes: set[Node]) -> list[Node]:
    """The calls that may write into the memory of these nodes: without them they would not be computed anew alike."""
    touched, found = set(nodes), []
    for node in graph.nodes:
        if touched.isdisjoint(node.all_input_nodes):
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            found.append(node)
        if schema is None or any(each.alias_info is not None for each in schema.returns):
            touched.add(node)
    return found


def _asked(
    asked: Node,
    nodes: Sequence[Node],
    given: Sequence[Node],
    literals: Mapping[Node, Tensor],
    leaves: tuple[int, ...],
    flat: Sequence[Any],
) -> BatchQuestion:
    graph = Graph()
    values = {node: graph.placeholder(node.name) for node in given}
    device = graph.placeholder("device_of_batch")
    for node in nodes:
        if node in literals:
            values[node] = graph.get_attr(str(node.target))
        elif node.op == "call_function":
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = {}
            # A batch may be asked before it is brought to the device of the trace.
            named = values[node].kwargs.items()
            values[node].kwargs = {key: device if isinstance(each, torch.device) else each for key, each in named}
    graph.output(values[asked])
    held = {str(node.target): value for node, value in literals.items()}
    run: Callable[..., Any] = GraphModule(held, graph).forward

    def ask(*values: Any) -> Any:
        device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
        with torch.no_grad():
            return run(*values, device)

    known, size = set(nodes), aten.sym_size.int
    of_data = any(user in known and user.target is not size for node in given for user in node.users)
    return BatchQuestion(ask, leaves, of_data, bool(ask(*(flat[leaf] for leaf in leaves))))


_COMPARED = {getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge")}


def _certain(node: Node) -> bool | None:
    """The answer of `torch.rand([]) < p` where it is the same for every number from 0 to below 1: no layer is dropped
    with p = 0.
    """
    compare = _COMPARED.get(node.target)
    if compare is None or not isinstance(node.args[0], Node) or node.args[0].target is not aten.rand.default:
        return None
    bound = node.args[1]
    if not isinstance(bound, int | float):
        return None
    answers = {compare(0.0, bound), compare(math.nextafter(1.0, 0.0), bound)}
    return answers.pop() if len(answers) == 1 else None
