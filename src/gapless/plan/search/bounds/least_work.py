"""What layers take at the least, and what there is of memory: what bounds are made of.

A backward takes at least the quicker of a whole B and an I with a W, since lowering may split and fuse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gapless.plan.profile.contention import ALONE
from gapless.plan.profile.profile import Profile

ROUNDING = 1e-9  # sums of floats vary with their order

WHOLE = frozenset({"naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs"})
"""Recipes whose weight gradients never wait: each follows its input gradient, or is one with it."""


_ALIKE = 1.005  # times the quickest: layers up to there count as it


class Limits(NamedTuple):
    """What there is of memory for a pipeline.

    each    bytes of every device
    shards  replicas that share out the optimizer's state
    slack   what the allocator loses, as a share of what comes and goes
    """

    each: tuple[float, ...]
    shards: int
    slack: float


@dataclass(frozen=True)
class LeastWork:
    """Of a layer for one microbatch at speed 1, at the least: F, until its gradient is handed on, and the backward."""

    forward: float
    handed: float
    backward: float

    @property
    def all(self) -> float:
        return self.forward + self.backward


def layer_works(profile: Profile, together: bool) -> tuple[LeastWork, ...]:
    """Of every layer. `together`: devices run beside each other."""
    slower = profile.contention if together else ALONE
    found = []
    for layer in profile.layers:
        whole = slower.backward * layer.whole_backward
        inputs, weights = slower.halves * layer.input_grad.median, slower.halves * layer.weight_grad.median
        found.append(LeastWork(slower.forward * layer.forward.median, min(whole, inputs), min(whole, inputs + weights)))
    return tuple(found)


def entry_work(profile: Profile, *, alone: bool) -> LeastWork:
    """What it takes to begin the actions of a stage."""
    slower = ALONE if alone else profile.contention
    backward = min(slower.backward, slower.halves) * profile.entry.backward
    return LeastWork(slower.forward * profile.entry.forward, backward, backward)


def alike(works: Sequence[float]) -> tuple[float, list[bool]]:
    """The largest group of layers that are about as long: the shortest of them, and which they are."""
    groups: list[list[float]] = []
    for work in sorted(works):
        if groups and work <= _ALIKE * groups[-1][0]:
            groups[-1].append(work)
        else:
            groups.append([work])
    each = max(groups, key=len)[0]
    return each, [each <= work <= _ALIKE * each for work in works]
