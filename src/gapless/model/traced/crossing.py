"""Where a traced graph is cut: stages of equal cost first, then little that crosses, and never where it would be wrong.

    position p cuts after node p:  n0 ... np | np+1 ... nn
    crossing(p)                    every value made up to p, or given as input, that a later node uses

A value that is changed in place must not cross before its last change: beyond a cut it has no history, and
autograd would not see the change. So from the birth of its memory to its last change no cut is allowed; likewise from
the first to the last use of a buffer that is changed.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from gapless.errors import PartitionError, TooFewLayersError
from gapless.model.fidelity.in_place_changes import changed_buffers, tensors_of, unbroken

from .graph_cuts import GraphCuts
from .operators import PYTHON
from .trace import Trace

aten = torch.ops.aten
_ELEMENT = 8.0  # what touching an element costs, in multiplications
# On an H200, as measured: memory costs more beside multiplications, every call has kernels to start, and float32 is
# slower to multiply.
_GPU_ELEMENT, _GPU_CALL, _GPU_FLOAT32 = 200.0, 2e8, 8.0
_HOST_CALL, _HOST_VIEW = 1.2e9, 0.5e9  # what a host needs meanwhile, for forward and backward of a call
_SLACK = 1.03  # how much slower than the best the slowest stage may be for the sake of less crossing
_CANDIDATES = 600


class Crossing:
    """For every position of a trace: what crosses there, how many bytes, and whether a cut is allowed. `eager`: on a
    GPU no CUDA graphs are made of it.
    """

    def __init__(self, trace: Trace, *, eager: bool = False) -> None:
        self.trace = trace
        nodes = trace.nodes
        self.index = {node: number for number, node in enumerate(nodes)}
        self.last = _last_uses(trace, self.index)
        self.costs = [_cost(node) for node in nodes]
        if eager and sum(launches := [_host_cost(node) for node in nodes]) > sum(self.costs):
            self.costs = launches
        self._births = dict.fromkeys(trace.inputs, -1) | self.index
        change = [0.0] * (len(nodes) + 1)
        for node, birth in self._births.items():
            if self.last.get(node, -1) > birth:
                change[max(birth, 0)] += _bytes(node)
                change[self.last[node]] -= _bytes(node)
        self.bytes = list(accumulate(change))[: len(nodes)]
        self.allowed = [True] * len(nodes)
        for start, end in unbroken(trace, self.index):
            for position in range(max(start, 0), end):
                self.allowed[position] = False

    def values(self, position: int) -> list[Node]:
        """What crosses there, in the graph's order."""
        return [node for node, birth in self._births.items() if birth <= position < self.last.get(node, -1)]

    def parameters(self) -> dict[str, list[int]]:
        """Where each parameter, buffer or constant is used, by its name."""
        uses: dict[str, list[int]] = {}
        for number, node in enumerate(self.trace.nodes):
            for arg in node.all_input_nodes:
                if arg.op == "get_attr":
                    uses.setdefault(str(arg.target), []).append(number)
        return uses


def choose(crossing: Crossing, num_stages: int) -> list[int]:
    """Positions of the cuts: the slowest stage within a few percent of the best, and then the fewest bytes."""
    sums = [0.0, *accumulate(crossing.costs)]
    total = sums[-1]
    places = _candidates(crossing, total / _CANDIDATES if len(crossing.costs) > _CANDIDATES else 0.0)
    if len(places) < num_stages - 1:
        buffers = changed_buffers(crossing.trace)
        why = f", since its forward changes {', '.join(buffers[:3])}, whose uses stay in one stage" if buffers else ""
        raise TooFewLayersError(
            f"the traced model can be cut in {len(places)} places{why}, but {num_stages} stages were asked for: use "
            "fewer devices or stages per device, or cut it by hand with layers=",
            len(places) + 1,
        )
    ends = [*(sums[place + 1] for place in places), total]
    bound = _least_bound(ends, num_stages) * _SLACK
    # best[i]: fewest bytes with a stage that ends at candidate i; one stage more in every round.
    best = [0.0 if end <= bound else math.inf for end in ends]
    trail: list[list[int]] = []
    for _ in range(num_stages - 1):
        new, source = [math.inf] * len(ends), [-1] * len(ends)
        for end in range(len(ends)):
            for start in range(end - 1, bisect_left(ends, ends[end] - bound) - 1, -1):
                value = best[start] + crossing.bytes[places[start]]
                if value < new[end]:
                    new[end], source[end] = value, start
        best = new
        trail.append(source)
    cuts, at = [], len(ends) - 1
    for source in reversed(trail):
        at = source[at]
        assert at >= 0, "the bound leaves room for every stage"
        cuts.append(places[at])
    return cuts[::-1]


def even_cuts(crossing: Crossing, most: int) -> list[int]:
    """Positions of the cuts that make up to so many layers of about the same cost, each where little crosses."""
    return _candidates(crossing, sum(crossing.costs) / (most - 1))


def homes_of(crossing: Crossing, cuts: Sequence[int]) -> dict[str, set[int]]:
    """The stages that use each parameter, buffer or constant, by its name."""
    return {name: {bisect_left(cuts, use) for use in uses} for name, uses in crossing.parameters().items()}


def is_graph_of(cuts: GraphCuts, crossing: Crossing) -> bool:
    """Whether it may be cut just there, with the same parameters in each stage."""
    if len(crossing.costs) != cuts.num_nodes or not all(crossing.allowed[place] for place in cuts.after):
        return False
    known = cuts.homes
    return all(stages == known.get(name, stages) for name, stages in homes_of(crossing, cuts.after).items())


def follow(crossing: Crossing, homes: dict[str, set[int]], num_stages: int) -> list[int]:
    """Cuts of another trace of the same model that leave every parameter in the stage where it is."""
    uses = crossing.parameters()
    low, high = [-1] * (num_stages - 1), [len(crossing.costs) - 1] * (num_stages - 1)
    for name, numbers in uses.items():
        stages = homes.get(name, set())
        if len(stages) != 1:
            continue
        (stage,) = stages
        for cut in range(num_stages - 1):
            if stage <= cut:
                low[cut] = max(low[cut], max(numbers))
            else:
                high[cut] = min(high[cut], min(numbers) - 1)
    return _placed(crossing, low, high)


def _placed(crossing: Crossing, low: Sequence[int], high: Sequence[int]) -> list[int]:
    """Cuts within these bounds, in order, each where least crosses; a stage may be left without a node."""
    latest: list[int] = []  # where each cut may be so that those after it find a place
    for first, last in zip(reversed(low), reversed(high), strict=True):
        last = min([last, *latest[-1:]])
        places = [place for place in range(max(first, 0), last + 1) if crossing.allowed[place]]
        latest.append(places[-1] if places else -1)
    cuts: list[int] = []
    for first, last in zip(low, reversed(latest), strict=True):
        start = max([first, 0, *cuts[-1:]])
        places = [place for place in range(start, last + 1) if crossing.allowed[place]]
        if not places:
            raise PartitionError(
                f"this batch takes another path through the model, on which cut {len(cuts)} can't stay where the first "
                "batch or the plan has it: pass batches that take the same path, or cut the model by hand with "
                "layers="
            )
        cuts.append(min(places, key=lambda place: crossing.bytes[place]))
    return cuts


def _candidates(crossing: Crossing, step: float) -> list[int]:
    """Allowed positions; of those in one `step` of the cost the one where least crosses."""
    sums = list(accumulate(crossing.costs))
    best: dict[float, int] = {}
    for place, reached in enumerate(sums[:-1]):
        if not crossing.allowed[place] or reached == 0.0 or reached == sums[-1]:
            continue
        key = reached // step if step else reached
        if key not in best or crossing.bytes[place] < crossing.bytes[best[key]]:
            best[key] = place
    return sorted(best.values())


def _least_bound(ends: Sequence[float], num_stages: int) -> float:
    """The least cost of the slowest stage, with stages that end at some of `ends`."""
    low, high = 0.0, ends[-1]
    for _ in range(60):
        middle = (low + high) / 2
        if _stages_needed(ends, middle) <= num_stages:
            high = middle
        else:
            low = middle
    return high


def _stages_needed(ends: Sequence[float], bound: float) -> float:
    count, start = 1, 0.0
    for before, end in zip([0.0, *ends], ends, strict=False):
        if end - before > bound:
            return math.inf
        if end - start > bound:
            count, start = count + 1, before
    return count


def names_of(trace: Trace, cuts: Sequence[int], model: nn.Module) -> list[str]:
    """For each stage its first and its last module, in the user's names: the outermost that are in no other stage.
    `cuts` are the positions after which the trace is cut.
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
        number = end - before
        between = f"{number} operation{'s' if number > 1 else ''} between modules"
        ends = dict.fromkeys((inside[0], inside[-1])) if inside else [between]
        found.append(" to ".join(ends))
    return found


def _path(node: Node, known: set[str]) -> list[str]:
    """The modules in whose forward a node is, from the outermost."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [str(name).partition("@")[0] for name, _ in stack.values()]
    return [name for name in names if name in known]


def _last_uses(trace: Trace, index: dict[Node, int]) -> dict[Node, int]:
    last = {arg: index[node] for node in trace.nodes for arg in node.all_input_nodes}
    return last | dict.fromkeys(trace.output.all_input_nodes, len(trace.nodes))


def _number(size: Any) -> int:
    """A size, or what it was in the example."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 1


def _numel(tensor: Tensor) -> int:
    return math.prod(_number(size) for size in tensor.shape)


def _bytes(node: Node) -> int:
    return sum(_numel(tensor) * tensor.dtype.itemsize for tensor in tensors_of(node.meta.get("val")))


def _cost(node: Node) -> float:
    """In multiplications: those of the forward, and what it costs to touch the elements of the result."""
    outs = list(tensors_of(node.meta.get("val")))
    if not outs:
        return 0.0
    elements = sum(_numel(out) for out in outs)
    ins = [tensor for arg in node.all_input_nodes for tensor in tensors_of(arg.meta.get("val"))]
    target = PYTHON.get(node.target, node.target)
    name = getattr(target, "__name__", str(target))
    each = 0.0
    if name.startswith("conv") and len(ins) > 1 and ins[1].dim() > 1:
        each = _numel(ins[1]) // max(1, _number(ins[1].shape[0]))
    elif name in ("linear", "mm", "matmul", "bmm.default", "addmm", "baddbmm.default"):
        each = _number(ins[1 if "addmm" in name or "baddbmm" in name else 0].shape[-1])
    elif name == "_attention":
        each = 2 * _number(ins[1 if len(ins) > 1 else 0].shape[-2])  # a tensor may attend to itself
    elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        each = sum(_numel(weight) for weight in ins[2:]) // max(1, _number(outs[0].shape[-1]))
    elif _is_view(node):
        return 0.0
    if outs[0].is_cuda:
        each *= _GPU_FLOAT32 if outs[0].dtype is torch.float32 else 1
        return elements * (each + _GPU_ELEMENT) + _GPU_CALL
    return float(elements) * (each + _ELEMENT)


def _host_cost(node: Node) -> float:
    """What a host needs that launches it, in the same unit."""
    on_gpu = any(out.is_cuda for out in tensors_of(node.meta.get("val")))
    return (_HOST_VIEW if _is_view(node) else _HOST_CALL) if on_gpu else 0.0


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
