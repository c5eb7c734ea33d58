"""How long a replicated stage takes, and the hops around it: as we run them, or as PipeDream's program counts."""

from collections.abc import Callable
from dataclasses import dataclass

from gapless.plan.profile.profile import Link


@dataclass(frozen=True)
class Form:
    """How the time of a stage and of the hops around it is counted, on parts that a link connects.

    stage    of the time of one part alone, the weights, the parts, and the devices of a part
    hop      of the bytes that come in, and the parts that take them
    leaving  of the bytes that go out, and the parts that make them
    """

    name: str
    stage: Callable[[Link, float, float, int, int], float]
    hop: Callable[[Link, float, int], float]
    leaving: Callable[[Link, float, int], float]


RING = Form(
    "ring",
    stage=lambda link, alone, weights, parts, _: max(alone / parts, link.all_reduce(weights, parts)),
    hop=lambda link, size, _: 2 * (link.seconds(size) + link.latency),
    leaving=lambda link, size, _: 0.0,
)
"""One all-reduce per minibatch while others compute, and hops with their latency: what `Pipeline` runs."""

PIPEDREAM = Form(
    "pipedream",
    stage=lambda link, alone, weights, parts, inner: (
        (alone + link.seconds(4 * (parts - 1) * weights) / (parts * inner)) / parts
    ),
    hop=lambda link, size, parts: 2 * link.seconds(size) / parts,
    leaving=lambda link, size, parts: 2 * link.seconds(size) / parts,
)
"""As its optimizer's program has it: an all-reduce of twice the bytes that no computation hides, and hops shared by the
replicas of a stage, of what comes in and, behind the first stage, of what goes out. No latency."""

FORMS = {form.name: form for form in (RING, PIPEDREAM)}
