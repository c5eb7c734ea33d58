"""An emulated link: a step waits for it, and nothing else changes."""

import time

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.planner.apart import late
from gapless.pipeline.pipeline import Pipeline


def test_a_late_link_makes_a_step_longer_and_changes_nothing_else() -> None:
    x, y = torch.linspace(-1, 1, 8).view(4, 2), torch.zeros(4, 2)
    grads, seconds = [], []
    for latency in (0.0, 0.05):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        with Pipeline(model, devices=late(["cpu"] * 3, latency), microbatches=2, loss=F.mse_loss) as pipe:
            begin = time.perf_counter()
            pipe.step(x, y)
            seconds.append(time.perf_counter() - begin)
        grads.append([parameter.grad for parameter in model.parameters()])
    assert seconds[1] >= 2 * 2 * 0.05  # there and back, over two links
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
