"""One microbatch both ways, eagerly and as CUDA graphs: its bits, and its seconds."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import microbatch as mb


class Trial:
    """What one microbatch has told so far."""

    def __init__(self) -> None:
        self.equal = True
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

    def compare(self, one: Any, other: Any) -> None:
        """Trees of tensors."""
        ones, others = mb.flatten(one)[0], mb.flatten(other)[0]
        same = len(ones) == len(others) and all(_same_bits(a, b) for a, b in zip(ones, others, strict=True))
        self.equal = self.equal and same

    def verdict(self, *, faster: bool) -> str | None:
        """Why graphs are not taken, if they are not; `faster`: only if they are."""
        if not self.equal:
            return "a replay did not have the bits of the eager run"
        if faster and self.graphed >= self.eager:
            return f"it is not faster so ({1e3 * self.graphed:.2f} ms, eagerly {1e3 * self.eager:.2f} ms)"
        return None


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Numbers that are none included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b))
    return torch.equal(one, other)
