"""One microbatch both ways, eagerly and as CUDA graphs: its bits, and its seconds.

Some kernels add up in the order in which threads happen to come, attention's backward among them: such a layer has
other bits every time it runs, or once in a hundred times. Where eager runs differ from each other, a replay may differ
from them too: about as much, or by what rounding does. Where they do not, another replay must have their bits.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.stage.batch import microbatch as mb

from .graph_memory import Grads, GraphedHalf, grads_aside

_TIMES = 4.0
_MOST_RUNS = 32  # a sum may come out the same more often than not


class Trial:
    """What one microbatch has told so far."""

    def __init__(self) -> None:
        self.distance = 0.0  # of a replay from the eager run
        self.over = False
        self.eager = self.graphed = 0.0
        self.handed: Any = None  # what the eager forward has made

    def timed(self, run: Callable[[], Any], *, graphed: bool) -> Any:
        """Runs it, to its end on the GPU."""
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        result = run()
        torch.cuda.current_stream().synchronize()
        seconds = time.perf_counter() - start
        if graphed:
            self.graphed += seconds
        else:
            self.eager += seconds
        return result

    def half(
        self,
        eagerly: Callable[[], Grads],
        graphed: GraphedHalf,
        seed: Callable[[int], int],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[Grads, list[tuple[nn.Parameter, Tensor]]]:
        """What the eager run of a backward makes, which is held against the replay."""
        with grads_aside(parameters) as added:
            eager: Grads = self.timed(eagerly, graphed=False)
        self.timed(lambda: graphed.replay.run(seed), graphed=True)
        self.compare([eager, [each for _, each in added]], [graphed.found(), graphed.added_in_full()])
        return eager, added

    def compare(self, one: Any, other: Any) -> None:
        """Trees of tensors."""
        self.distance = max(self.distance, distance(one, other))

    def verdict(self, eagerly: Callable[[], Any], replayed: Callable[[], Any], *, faster: bool) -> str | None:
        """Why graphs are not taken, if they are not; `faster`: only if they are. The other two run it once more."""
        if self.distance:
            first = eagerly()
            spread = next(filter(None, (distance(first, eagerly()) for _ in range(_MOST_RUNS))), 0.0)
            unequal = not self.distance < min(math.inf, _TIMES * max(spread, _rounding(first)))
            if not spread and not unequal:
                unequal = all(distance(first, replayed()) for _ in range(_MOST_RUNS))
            if unequal:
                return f"a replay differs from the eager run by {self.distance:.1g}, and two of those by {spread:.1g}"
        if faster and self.graphed >= self.eager:
            return f"graphs are not faster ({1e3 * self.graphed:.2f} ms, eagerly {1e3 * self.eager:.2f} ms)"
        return None


def distance(one: Any, other: Any) -> float:
    """How far two trees are apart: 0 if all bits are equal, else the most that any tensor differs by, as a share of its
    norm; infinite for what has no such share.
    """
    ones, others = mb.flatten(one)[0], mb.flatten(other)[0]
    if len(ones) != len(others):
        return math.inf
    return max((_apart(a, b) for a, b in zip(ones, others, strict=True)), default=0.0)


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    a, b = a.detach(), b.detach()
    if torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b))):  # numbers that are none too
        return 0.0
    if not a.is_floating_point():
        return math.inf
    infinite = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))  # in both, as where float16 overflows
    if infinite.any():
        return _apart(a.masked_fill(infinite, 0), b.masked_fill(infinite, 0))
    share = float(_norm(a - b) / _norm(a))
    return max(share, math.ulp(0.0)) if math.isfinite(share) else math.inf


def _rounding(tree: Any) -> float:
    """That of the coarsest numbers in it, or behind it where autocast is on."""
    types = {each.dtype for each in mb.flatten(tree)[0] if each.is_floating_point()}
    if torch.is_autocast_enabled("cuda"):
        types.add(torch.get_autocast_dtype("cuda"))
    return max((torch.finfo(each).eps for each in types), default=0.0)


def _norm(tensor: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return found
