"""What a plan is searched for: said once, for `make_plan`, the planner, the search and the command line alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from gapless.errors import ConfigError
from gapless.plan.plan import Remat
from gapless.plan.profile.machine import Mesh
from gapless.plan.search.choices import check_recipes

Offload = Literal["none", "activations", "optimizer", "both"]
OFFLOAD: tuple[Offload, ...] = get_args(Offload)


@dataclass(frozen=True)
class SearchOptions:
    """What the plan may be, and how long to look for it.

    microbatches     only this many; by default several numbers are tried
    schedules        only these; by default all with a flush, and `auto` where they do best
    replicas         several pipelines side by side are tried too; otherwise one of all devices
    mesh             only this one
    shard_optimizer  the optimizer's state is shared out among replicas
    slack            what the allocator loses, as a share of what comes and goes; the profile's unless given
    time_limit       in seconds; what was found until then is the answer
    remat            how a stage may be recomputed
    offload          what is in the host's memory: "activations" where that helps and nobody has to wait for them, the
                     state of the "optimizer", "both" or "none"
    overlap          parameters and optimizer state are held twice, for an optimizer step that does not wait
    """

    microbatches: int | None = None
    schedules: Sequence[str] | None = None
    replicas: bool = False
    mesh: Mesh | None = None
    shard_optimizer: bool = False
    slack: float | None = None
    time_limit: float | None = 60.0
    remat: tuple[Remat, ...] = ("stage", "layer")
    offload: Offload = "none"
    overlap: bool = False

    def __post_init__(self) -> None:
        check_number("slack", self.slack)
        check_number("time_limit", self.time_limit)
        if self.schedules is not None:
            check_recipes(self.schedules)
        if self.offload not in OFFLOAD:
            raise ConfigError(f"offload is {self.offload!r:.40}, but for a plan it must be one of {', '.join(OFFLOAD)}")
        if self.overlap and self.offload in ("optimizer", "both"):
            raise ConfigError(
                f"offload is {self.offload!r}, but a step on state in host memory can't be undone: leave out overlap "
                "or offload activations only"
            )


def check_number(name: str, value: float | None) -> None:
    """Raises where it is given and below 0, or no number."""
    if value is not None and not 0 <= value < math.inf:
        raise ConfigError(f"{name} is {value!r}, but it must be a number of at least 0")


ANYTHING = SearchOptions()
