"""A piece of a trace in which torch.compile has what lies between the calls that a stage answers itself.

piece      linear tanh [dropout] linear gelu add [dropout] linear
compiled   ----------            ---------------           -----     each by itself; draws keep their seeds
"""

import operator
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from torch.fx import Graph, GraphModule, Node

from gapless.stage.compiled import Compiler


def in_segments(graph: Graph, own: Callable[[Node], bool], compiler: Compiler) -> Graph:
    """The same graph, in which stretches of calls that are nobody's `own` are one compiled call each."""
    made = Graph()
    values: dict[Node, Node] = {}
    for is_own, nodes in groupby(list(graph.nodes), lambda node: node.op != "call_function" or own(node)):
        stretch = list(nodes)
        if is_own or len(stretch) == 1:
            for node in stretch:
                values[node] = made.node_copy(node, values.__getitem__)
        else:
            _add_segment(made, stretch, values, compiler)
    return made


def _add_segment(made: Graph, nodes: Sequence[Node], values: dict[Node, Node], compiler: Compiler) -> None:
    inside = set(nodes)
    incoming = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in inside))
    outgoing = [node for node in nodes if any(user not in inside for user in node.users)]
    body = Graph()
    copies = {node: body.placeholder(node.name) for node in incoming}
    for node in nodes:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outgoing))
    compiled = compiler(GraphModule({}, body))

    def segment(*given: Any) -> Any:
        return compiled(*given)

    results = made.call_function(segment, tuple(values[node] for node in incoming))
    for number, node in enumerate(outgoing):
        values[node] = made.call_function(operator.getitem, (results, number))
