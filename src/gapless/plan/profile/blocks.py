"""A model of many equal blocks in short: a few of them are traced and sized, and stand for all.

    blocks   0 1 2 3 4 5 ... 79       kept   0 1 2 3       profile   0 1 1 1 1 2 ... 3

The first block and the last differ from those between in what comes before and after them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

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
    """Blocks in a row, from `offset` on each like the one `period` before it; the first `kept` stand for all."""

    path: str
    blocks: nn.ModuleList
    offset: int
    period: int
    kept: int

    def paths(self) -> list[str]:
        return [f"{self.path}.{number}" for number in range(self.kept)]


def measure_blocks(model: nn.Module, inputs: Any, **options: Any) -> Profile:
    """As `measure` for `flops`, with each block as a layer. Where blocks differ, all of the model is looked at."""
    rows = list(_rows(model))
    short = _in_short(model, rows, inputs, options) if rows else None
    return measure(model, inputs, **options) if short is None else short


def _in_short(model: nn.Module, rows: Sequence[BlockRow], inputs: Any, options: dict[str, Any]) -> Profile | None:
    flat, spec = flat_of(inputs)
    with slow_work("tracing the model"), _shortened(rows), hollow(model, torch.device("cpu")):
        crossing = Crossing(Trace(model, flat, spec))
    nodes = crossing.trace.nodes
    pieces = _pieces(crossing.trace, rows)
    starts = [*pieces, len(nodes)]
    if not pieces or not all(crossing.allowed[start - 1] for start in starts[1:-1]):
        return None
    graph = Graph(model, crossing, [start - 1 for start in starts[1:-1]])
    with slow_work("sizing layers"):
        found = measure_layers(graph.layers, ((0, *flat),), loss=own_loss, **options)
    layers = [
        (row or name, replace(layer, name=""), [str(node.target) for node in nodes[start:end]])
        for (start, end), row, name, layer in zip(
            pairwise(starts), pieces.values(), graph.names, found.layers, strict=True
        )
    ]
    for row in rows:
        at = next(place for place, each in enumerate(layers) if each[0] is row) + row.offset + row.period
        once = layers[at : at + row.period]
        if once != layers[at + row.period : at + 2 * row.period]:
            return None
        layers[at:at] = once * ((len(row.blocks) - row.kept) // row.period)
    numbers = {row.path: count() for row in rows}
    names = (each if isinstance(each, str) else f"{each.path}.{next(numbers[each.path])}" for each, *_ in layers)
    named = tuple(replace(layers[place][1], name=f"{place}.{name}") for place, name in enumerate(names))
    return replace(found, layers=named, samples=mb.batch_size(inputs))


def _rows(model: nn.Module, path: str = "") -> Iterator[BlockRow]:
    """Lists of blocks that are in no other, and can be made shorter."""
    for name, part in model.named_children():
        if isinstance(part, nn.ModuleList) and (row := _row(f"{path}{name}", part)) is not None:
            yield row
        else:
            yield from _rows(part, f"{path}{name}.")


def _row(path: str, blocks: nn.ModuleList) -> BlockRow | None:
    made, best, total = [_makeup(block) for block in blocks], None, len(blocks)
    for period in range(1, _LONGEST + 1):
        others = (number for number in range(period, total) if not _alike(made, number - period, number))
        offset = max(others, default=period - 1) - period + 1
        kept = offset + 4 * period + (total - offset) % period
        if kept < (best.kept if best else total):
            best = BlockRow(path, blocks, offset, period, kept)
    return best


def _makeup(block: nn.Module) -> list[Any]:
    """What tells one block from another: its modules, and their parameters, buffers and plain attributes."""
    found: list[Any] = []
    for name, module in block.named_modules():
        held = {**module._parameters, **module._buffers}
        kinds = {key: each is not None and (each.shape, each.dtype, each.requires_grad) for key, each in held.items()}
        found += [name, type(module), kinds]
        found += [value for _, value in sorted(vars(module).items()) if isinstance(value, _PLAIN)]
    return found


def _alike(made: Sequence[list[Any]], one: int, other: int) -> bool:
    """Whether two blocks differ at most in their own numbers."""
    pairs = zip(made[one], made[other], strict=False)
    return len(made[one]) == len(made[other]) and all(a == b or (a, b) == (one, other) for a, b in pairs)


@contextlib.contextmanager
def _shortened(rows: Sequence[BlockRow]) -> Iterator[None]:
    before = [dict(row.blocks._modules) for row in rows]
    try:
        for row in rows:
            del row.blocks[row.kept :]
        yield
    finally:
        for row, modules in zip(rows, before, strict=True):
            row.blocks._modules.update(modules)


def _pieces(trace: Trace, rows: Sequence[BlockRow]) -> dict[int, BlockRow | None]:
    """The nodes at which blocks begin, and what is before, between and behind them; none where blocks overlap."""
    spans: dict[str, tuple[int, int]] = {path: (len(trace.nodes), -1) for row in rows for path in row.paths()}
    for number, node in enumerate(trace.nodes):
        for path in spans.keys() & modules_of(node):
            spans[path] = (min(spans[path][0], number), number)
    if not all(one[0] <= one[1] < other[0] for one, other in pairwise([*spans.values(), (len(trace.nodes) - 1, 0)])):
        return {}
    pieces: dict[int, BlockRow | None] = {0: None}
    for row in rows:
        pieces |= {spans[path][0]: row for path in row.paths()} | {spans[row.paths()[-1]][1] + 1: None}
    return pieces
