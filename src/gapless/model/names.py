"""Which of a traced model's modules are in which stage, in the user's names."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn
from torch.fx import Node

from .trace import Trace


def names_of(trace: Trace, cuts: Sequence[int], model: nn.Module) -> list[str]:
    """For each stage its first and its last module: the outermost that are in no other stage. `cuts` are the positions
    after which the trace is cut.
    """
    known = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    paths = [_path(node, known) for node in trace.nodes]
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, path in enumerate(paths):
        for name in path:
            first.setdefault(name, place)
            last[name] = place
    found = []
    for before, end in pairwise([-1, *cuts, len(paths) - 1]):
        within = (
            [name for name in path if first[name] > before and last[name] <= end]
            for path in paths[before + 1 : end + 1]
        )
        inside = [names[0] for names in within if names]
        ends = dict.fromkeys((inside[0], inside[-1])) if inside else [f"{end - before} operations between modules"]
        found.append(" to ".join(ends))
    return found


def _path(node: Node, known: set[str]) -> list[str]:
    """The modules in whose forward a node is, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(name).partition("@")[0] for name, _ in stack.values()]
    return [name for name in names if name in known]
