"""How the learning rate changes: a rise, then a way down, as shares of the optimizer's own rate.

1 |    ____                    ____                      ____
  |   /    \\___                /    `-._                 /    ...
  |  /         \\___           /         `-._            /
0 |_/______________\\_       _/______________`-._      _/__________
    warmup   linear                cosine                constant
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from gapless.errors import ConfigError
from gapless.train.config import user_code as own
from gapless.train.config.config import Config
from gapless.train.config.tables import OUR_RATES

Scheduled = Callable[[torch.optim.Optimizer], LRScheduler]


def constant(done: float, floor: float) -> float:
    """The full rate."""
    return 1.0


def linear(done: float, floor: float) -> float:
    """`done` is the share of the way that lies behind."""
    return 1.0 - (1.0 - floor) * done


def cosine(done: float, floor: float) -> float:
    """Slow at both ends."""
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * done)) / 2.0


def rate(shape: Callable[[float, float], float], warmup: int, steps: int, floor: float, update: int) -> float:
    """The share of the full rate at that update, the first of which is 0."""
    if update < warmup:
        return (update + 1) / (warmup + 1)
    return shape(min(1.0, (update - warmup) / max(1, steps - warmup)), floor)


def scheduled(config: Config, files: own.Files) -> Scheduled:
    """What makes the scheduler of an optimizer."""
    part = config.scheduler
    function = own.load(part, config, files)
    if part.name in OUR_RATES:
        share = partial(rate, function, part.warmup, part.steps or config.train.steps, part.floor)
        return lambda optimizer: LambdaLR(optimizer, lambda update: share(update))  # a function is no part of its state

    def made(optimizer: torch.optim.Optimizer) -> LRScheduler:
        found = own.call(function, part, config, optimizer)
        if not isinstance(found, LRScheduler):
            raise ConfigError(f"scheduler: {part.name} returned {found!r:.40}, but it must return an LRScheduler")
        return found

    return made
