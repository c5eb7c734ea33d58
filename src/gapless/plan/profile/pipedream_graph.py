"""Profiles as PipeDream's profiler writes them: a graph of operators as text, with their times in milliseconds.

    node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=600.0, parameter_size=0.0
    node2 -- Conv2d -- forward_compute_time=2.5, backward_compute_time=6.1, activation_size=800.0, parameter_size=72.0
    <tab>node1 -- node2

A node's sizes are bytes: of what it returns, and of its weights. Several results are a list in brackets. An edge goes
from who makes something to who takes it. Files in which the optimizer has noted a stage for each node have it at the
end of their lines; it is not read.

A profile has its layers in a row, so the nodes are put into an order in which everything comes after what it takes,
branch by branch. What crosses where a stage ends is all that was made before and is taken after, skips included. Inputs
are no layers, since they are where the data is loaded, and neither is an item of a result that nobody takes. The file
does not say how a backward splits: half of it counts as the weight gradient, where there are weights. What a node
returns counts as what it keeps.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

from gapless.errors import ConfigError, printable
from gapless.plan.profile.profile import Layer, Profile, Seconds

_MILLISECOND = 1e-3
_NUMBERS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_EDGE = re.compile(r"\s+(\S+) -- (\S+)\s*")
_NODE = re.compile(r"(\S+) -- (.*?) -- (forward_compute_time=.*?)(?: -- stage_id=\d+)?\s*", re.DOTALL)


@dataclass
class _Node:
    name: str
    description: str
    forward: float  # milliseconds
    backward: float
    output: float  # bytes
    weights: float
    takes: list[str] = field(default_factory=list)
    makes: list[str] = field(default_factory=list)


def is_graph(text: str) -> bool:
    """Whether a file's text looks like such a graph."""
    return _NODE.fullmatch(text.lstrip().split("\n", 1)[0]) is not None


def parse_graph(text: str, name: str = "") -> Profile:
    """The nodes as layers. It has no links: PipeDream's are given beside it."""
    nodes = _nodes(text)
    inputs = {key for key, node in nodes.items() if not node.takes and node.description.startswith("Input")}
    unused = {key for key, node in nodes.items() if not node.makes and node.description.startswith("__getitem__")}
    size = sum(nodes[key].output for key in inputs)
    for key in inputs | unused:
        _remove(nodes, key)
    order = _in_order(nodes)
    if not any(nodes[key].forward or nodes[key].backward for key in order):
        raise ConfigError(f"no time was measured: all {len(order)} nodes take 0 milliseconds")
    pairs = zip(order, _crossing(nodes, order), strict=True)
    layers = tuple(_layer(nodes[key], crossing) for key, crossing in pairs)
    return Profile(printable(name), layers, input=round(size))


def _nodes(text: str) -> dict[str, _Node]:
    nodes: dict[str, _Node] = {}
    edges = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line):
            edges.append((number, edge[1], edge[2]))
            continue
        found = _NODE.fullmatch(line)
        if found is None:
            raise ConfigError(
                f"line {number} is neither a node, as `node1 -- Linear -- forward_compute_time=1.5, ...`, nor an edge, "
                "as a tab and `node1 -- node2`"
            )
        if found[1] in nodes:
            raise ConfigError(f"line {number}: {printable(found[1][:40])} appears twice")
        forward, backward, output, weights = _numbers(found[3], number)
        nodes[found[1]] = _Node(found[1], found[2], forward, backward, output, weights)
    for number, source, target in edges:
        for end in (source, target):
            if end not in nodes:
                raise ConfigError(f"line {number}: the edge has {printable(end[:40])}, which is not a node of the file")
        nodes[source].makes.append(target)
        nodes[target].takes.append(source)
    return nodes


def _numbers(text: str, line: int) -> list[float]:
    given = dict(pair.split("=", 1) for pair in text.split(", ") if "=" in pair)
    found = []
    for key in _NUMBERS:
        if key not in given:
            raise ConfigError(f"line {line} has no {key}")
        words = given[key].strip().strip("[]").split(";")
        try:
            value = math.fsum(float(word) for word in words)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 2**53:
            raise ConfigError(f"line {line}: {key} is {given[key][:40]!r}, but it must be a number of at least 0")
        found.append(value)
    return found


def _remove(nodes: dict[str, _Node], key: str) -> None:
    node = nodes.pop(key)
    for target in node.makes:
        if target in nodes:
            nodes[target].takes.remove(key)
    for source in node.takes:
        if source in nodes:
            nodes[source].makes.remove(key)


def _depths(nodes: dict[str, _Node]) -> dict[str, int]:
    """How many nodes are one after another before each of them."""
    waits = {key: len(node.takes) for key, node in nodes.items()}
    depths = dict.fromkeys(nodes, 0)
    ready = [key for key, count in waits.items() if not count]
    for key in ready:
        for target in nodes[key].makes:
            depths[target] = max(depths[target], depths[key] + 1)
            waits[target] -= 1
            if not waits[target]:
                ready.append(target)
    if len(ready) < len(nodes):
        stuck = next(key for key, count in waits.items() if count)
        raise ConfigError(f"the graph has a cycle: {printable(stuck[:40])} waits for itself")
    return depths


def _in_order(nodes: dict[str, _Node]) -> list[str]:
    """Each node right after what it takes, from the results back: the longest branch is whole before the next begins,
    so a short one, or a source, comes where it is needed.
    """
    depths = _depths(nodes)
    order: list[str] = []
    there: set[str] = set()
    path = sorted((key for key, node in nodes.items() if not node.makes), key=depths.__getitem__)
    while path:
        missing = [taken for taken in nodes[path[-1]].takes if taken not in there]
        if missing:
            path.append(max(missing, key=depths.__getitem__))
        elif (key := path.pop()) not in there:
            there.add(key)
            order.append(key)
    return order


def _crossing(nodes: dict[str, _Node], order: list[str]) -> list[float]:
    """Behind each node, the bytes that were made up to there and are taken later; behind the last what it returns."""
    place = {key: at for at, key in enumerate(order)}
    ends: dict[int, float] = defaultdict(float)  # where something is taken last: how much
    alive, found = 0.0, []
    for at, key in enumerate(order):
        node = nodes[key]
        last = max((place[target] for target in node.makes), default=at)
        alive += node.output
        ends[last] += node.output
        alive -= ends.pop(at, 0.0)
        found.append(alive)
    return [*found[:-1], nodes[order[-1]].output]


def _layer(node: _Node, crossing: float) -> Layer:
    forward, backward = node.forward * _MILLISECOND, node.backward * _MILLISECOND
    weight_grad = backward / 2 if node.weights else 0.0
    weights, output = round(node.weights), round(node.output)
    return Layer(
        name=printable(f"{node.name} {node.description.split('(')[0].strip()}"[:60]),
        forward=Seconds(forward),
        input_grad=Seconds(backward - weight_grad),
        weight_grad=Seconds(weight_grad),
        backward=Seconds(backward),
        recompute=Seconds(forward),
        parameters=weights,
        gradients=weights,
        optimizer_state=2 * weights,
        activation=output,
        kept_for_weight_grad=output if node.weights else 0,
        boundary=round(crossing),
    )
