"""A model of many equal blocks in short: a few of them are traced and sized, and stand for all.

    blocks   0 1 2 3 4 5 ... 79       kept   0 1 2 3       profile   0 1 2 1 1 1 ... 3

The first block and the last differ from those between in what comes before and after them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node

from gapless.model.traced.capture import flat_of, own_loss
from gapless.model.traced.crossing import Crossing
from gapless.model.traced.hollow import hollow
from gapless.model.traced.trace import Trace
from gapless.plan.profile.measure import measure, measure_layers
from gapless.plan.profile.profile import Profile
from gapless.plan.profile.traced import Graph, modules_of
from gapless.slow_work import slow_work
from gapless.stage.batch import microbatch as mb

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_LONGEST = 8  # of blocks that come in turns


class BlockRow(NamedTuple):
    """Blocks in a row, each like the one `period` before it; the first `kept` stand for all."""

    path: str
    blocks: nn.ModuleList
    offset: int
    period: int
    kept: int

    @property
    def left_out(self) -> int:
        return len(self.blocks) - self.kept


Place = tuple[BlockRow, int]  # a block


def measure_blocks(model: nn.Module, inputs: Any, **options: Any) -> Profile:
    """As `measure` for `flops`, with each block as a layer. Where blocks differ, all of the model is looked at."""
    rows = list(_rows(model))
    short = _in_short(model, rows, inputs, options) if rows else None
    return measure(model, inputs, **options) if short is None else short


def _in_short(model: nn.Module, rows: Sequence[BlockRow], inputs: Any, options: dict[str, Any]) -> Profile | None:
    flat, spec = flat_of(inputs)
    with slow_work("tracing the model"), _shortened(rows), hollow(model, torch.device("cpu")):
        trace = Trace(model, flat, spec)
    pieces = _pieces(trace, rows)
    crossing = Crossing(trace)
    if pieces is None or not all(crossing.allowed[start - 1] for start in list(pieces)[1:]):
        return None
    starts = [*pieces, len(trace.nodes)]
    graph = Graph(model, crossing, [start - 1 for start in starts[1:-1]])
    with slow_work("sizing layers"):
        found = measure_layers(graph.layers, ((0, *flat),), loss=own_loss, **options)
    calls = [[str(node.target) for node in trace.nodes[a:b]] for a, b in pairwise(starts)]
    layers = [
        (name if place is None else place, replace(layer, name=""), called)
        for name, place, layer, called in zip(graph.names, pieces.values(), found.layers, calls, strict=True)
    ]
    for row in rows:
        at = next(number for number, (place, *_) in enumerate(layers) if place == (row, row.offset + row.period))
        once, again = (layers[at + turn * row.period : at + (turn + 1) * row.period] for turn in range(2))
        if [each[1:] for each in once] != [each[1:] for each in again]:
            return None
        layers[at + row.period : at + row.period] = once * (row.left_out // row.period)
    numbers = dict.fromkeys(rows, -1)
    named = []
    for number, (place, layer, _) in enumerate(layers):
        if not isinstance(place, str):
            numbers[place[0]] += 1
            place = f"{place[0].path}.{numbers[place[0]]}"
        named.append(replace(layer, name=f"{number}.{place}"))
    return replace(found, layers=tuple(named), samples=mb.batch_size(inputs))


def _rows(model: nn.Module, path: str = "") -> Iterator[BlockRow]:
    """Lists of blocks that are in no other, and can be made shorter."""
    for name, part in model.named_children():
        here = f"{path}.{name}" if path else name
        if isinstance(part, nn.ModuleList) and (row := _row(here, part)) is not None:
            yield row
        else:
            yield from _rows(part, here)


def _row(path: str, blocks: nn.ModuleList) -> BlockRow | None:
    made = [_makeup(block) for block in blocks]
    count = len(made)
    best: BlockRow | None = None
    for period in range(1, _LONGEST + 1):
        others = (number for number in range(period, count) if not _alike(made, number - period, number))
        offset = max(others, default=period - 1) - period + 1
        kept = offset + 4 * period + (count - offset) % period
        if kept < (count if best is None else best.kept):
            best = BlockRow(path, blocks, offset, period, kept)
    return best


def _makeup(block: nn.Module) -> list[Any]:
    """What tells one block from another: its modules, and their parameters, buffers and plain attributes."""
    found: list[Any] = []
    for name, module in block.named_modules():
        held = [*module._parameters.items(), *module._buffers.items()]
        found += [name, type(module), [(key, _kind(each)) for key, each in held]]
        found += [value for key, value in sorted(vars(module).items()) if isinstance(value, _PLAIN)]
    return found


def _kind(tensor: Any) -> Any:
    return tensor is not None and (tensor.shape, tensor.dtype, tensor.requires_grad)


def _alike(made: Sequence[list[Any]], one: int, other: int) -> bool:
    """Whether two blocks differ at most in their own numbers."""
    ours, theirs = made[one], made[other]
    return len(ours) == len(theirs) and all(a == b or (a, b) == (one, other) for a, b in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def _shortened(rows: Sequence[BlockRow]) -> Iterator[None]:
    before = [dict(row.blocks._modules) for row in rows]
    try:
        for row in rows:
            for name in list(row.blocks._modules)[row.kept :]:
                del row.blocks._modules[name]
        yield
    finally:
        for row, modules in zip(rows, before, strict=True):
            row.blocks._modules.update(modules)


def _pieces(trace: Trace, rows: Sequence[BlockRow]) -> dict[int, Place | None] | None:
    """The nodes at which blocks begin, and what is before, between and behind them; None where blocks overlap."""
    paths = {f"{row.path}.{number}": (row, number) for row in rows for number in range(row.kept)}
    spans: dict[Place, tuple[int, int]] = {}
    for number, node in enumerate(trace.nodes):
        for place in _blocks_of(node, paths):
            spans[place] = (spans.get(place, (number, 0))[0], number)
    if list(spans) != list(paths.values()):
        return None
    pieces: dict[int, Place | None] = {0: None}
    for (row, number), (first, last) in spans.items():
        if first < max(pieces):
            return None
        pieces[first] = (row, number)
        if number == row.kept - 1:
            pieces[last + 1] = None
    return pieces


def _blocks_of(node: Node, paths: dict[str, Place]) -> list[Place]:
    return [paths[path] for path in modules_of(node) if path in paths]
