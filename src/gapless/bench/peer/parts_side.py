"""The parts of a model as contestants, each on its own rank and with nobody to wait for: no pipeline beats them."""

from collections.abc import Callable

import torch

from gapless.bench.peer.contest import Contest, loss


def prepare(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """The step of "parts": every rank its own part, at once; of "whole": the first rank all of them, and the others
    nothing.
    """
    torch.manual_seed(0)
    count = contest.devices if name == "whole" else 1
    layers = torch.nn.Sequential(*(contest.stage(1) for _ in range(count)))
    inputs = contest.inputs().split(contest.samples)
    target = contest.target()

    def step() -> None:
        if name == "parts" or rank == 0:
            for part in inputs:
                loss(layers(part.detach().requires_grad_(name == "parts" and rank > 0)), target).backward()

    return None, step
