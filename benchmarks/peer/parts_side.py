"""The parts of a model as contestants, each on its own rank and with nobody to wait for: no pipeline beats them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.peer.contest import Contest, loss


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """The step of "parts": every rank its own part, at once; of "whole": the first rank all of them, and the others
    nothing. "parts graphed": a microbatch of it is one CUDA graph.
    """
    torch.manual_seed(0)
    count = contest.devices if name == "whole" else 1
    layers = torch.nn.Sequential(*(contest.stage(1) for _ in range(count)))
    inputs = contest.inputs().split(contest.samples)
    target = contest.target()

    needs_grad = name != "whole" and rank > 0
    if name == "parts graphed":
        return None, _graphed(layers, inputs, needs_grad, target)

    def step() -> None:
        if name == "parts" or rank == 0:
            for part in inputs:
                loss(layers(part.detach().requires_grad_(needs_grad)), target).backward()

    return None, step


def _graphed(layers: nn.Module, inputs: Sequence[Tensor], needs_grad: bool, target: Tensor) -> Callable[[], object]:
    """Gradients stay where they are, so that a graph can add to them."""
    place = inputs[0].clone().requires_grad_(needs_grad)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(layers(place), target).backward()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss(layers(place), target).backward()

    def step(*_: object) -> None:
        for part in inputs:
            place.data.copy_(part)
            graph.replay()

    return partial(step, layers, target)  # which the graph reads, and does not hold
