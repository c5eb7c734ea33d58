"""About what a choice takes: it says in which order choices are tried, and never leaves one out.

What is known of each recipe: the bubble as in the table of schedules, how many microbatches a device holds, and what a
hop costs. A choice that would not fit as it is counts as recomputed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gapless.plan.profile.profile import Profile
from gapless.plan.search.choices import Choice


class _Sizes(NamedTuple):
    """K devices, M microbatches, v stages of a device; F, B, I and W of one device for one microbatch."""

    K: int
    M: int
    v: int
    f: float
    b: float
    i: float
    w: float


_Formula = Callable[[_Sizes], float]

_BUBBLES: dict[str, _Formula] = {
    **dict.fromkeys(("gpipe", "1f1b", "eager-1f1b"), lambda s: (s.K - 1) * (s.f + s.b)),
    **dict.fromkeys(("interleaved", "looped-bfs"), lambda s: (s.K - 1) * (s.f + s.b) / s.v),
    **dict.fromkeys(("zb-h1", "zb-h2"), lambda s: (s.K - 1) * max(0.0, s.f + s.i - s.w)),
    **dict.fromkeys(("zb-v", "dualpipe-v"), lambda s: (s.K - 1) * s.f / 2),
    "v-half": lambda s: (s.K - 1) * (s.f + s.b) / 2,
    "v-min": lambda s: (s.K - 1) * (s.f + s.b) * 2 / 3,
}
_HELD: dict[str, _Formula] = {
    **dict.fromkeys(("gpipe", "looped-bfs"), lambda s: s.M),
    **dict.fromkeys(("1f1b", "zb-h1", "zb-v", "dualpipe-v"), lambda s: s.K),
    **dict.fromkeys(("eager-1f1b", "zb-h2"), lambda s: 2 * s.K - 1),
    "interleaved": lambda s: s.K + (s.K - 1) / s.v,
    "v-half": lambda s: (s.K + 2) // 2,
    "v-min": lambda s: (s.K + 4) // 3,
}
_LIKE = {1: ("1f1b", "zb-h1", "zb-h2"), 2: ("zb-v", "v-half", "v-min")}  # what `auto` does no worse than
_WAITS = ("1f1b", "zb-h1")  # for every hop, again and again


class Totals(NamedTuple):
    """Of all layers, for one microbatch: seconds at speed 1, and bytes."""

    forward: float
    backward: float
    input_grad: float
    weight_grad: float
    recompute: float
    most: float  # of one layer, forward and backward
    gradients: float
    kept: float
    activation: float
    boundary: float  # on average

    @classmethod
    def of(cls, profile: Profile, shards: int) -> "Totals":
        layers = profile.layers
        return cls(
            forward=sum(layer.forward.median for layer in layers),
            backward=sum(layer.whole_backward for layer in layers),
            input_grad=sum(layer.input_grad.median for layer in layers),
            weight_grad=sum(layer.weight_grad.median for layer in layers),
            recompute=sum(layer.recompute.median for layer in layers),
            most=max(layer.work for layer in layers),
            gradients=sum(layer.gradients for layer in layers),
            kept=sum(layer.kept(shards) for layer in layers),
            activation=sum(layer.activation for layer in layers),
            boundary=sum(layer.boundary for layer in layers) / len(layers),
        )


def estimated(
    profile: Profile,
    totals: Totals,
    choice: Choice,
    speeds: Sequence[float],
    limits: Sequence[int | None],
    slack: float,
) -> float:
    """Seconds of a step."""
    K, M, power = choice.mesh.num_devices, choice.microbatches, sum(speeds)
    times = (totals.forward, totals.backward, totals.input_grad, totals.weight_grad)
    sizes = _Sizes(K, M, choice.stages_per_device, *(time / power for time in times))
    work = M * max(sizes.f + sizes.b, totals.most / max(speeds))
    summed = choice.mesh.sum_seconds(profile, 0, totals.gradients / K)
    if K == 1:
        return work + summed
    fixed = totals.kept / K + profile.reserved
    each = (1 + slack) * totals.activation / K
    room = min((limit for limit in limits if limit is not None), default=None)
    again = M * totals.recompute / power
    link = choice.mesh.hop(profile, 0, 1)
    hop = link.latency + link.seconds(totals.boundary)

    def takes(recipe: str) -> float:
        held = min(float(M), _HELD[recipe](sizes))
        full = room is not None and fixed + held * each > room
        hops = 2 * M * (K - 1) / K * hop if recipe in _WAITS else 2 * (K - 1) * choice.stages_per_device * hop
        return work + _BUBBLES[recipe](sizes) + hops + (again if full else 0.0) + summed

    if choice.recipe == "auto":
        return 1.001 * min(map(takes, _LIKE[choice.stages_per_device]))
    return takes(choice.recipe)
