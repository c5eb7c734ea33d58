"""What is asked of a recipe."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gapless.errors import ConfigError
from gapless.schedule import placement as placing
from gapless.schedule.costs import Costs, Number
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement
from gapless.schedule.recipes import line
from gapless.schedule.timeline import Objective


@dataclass(frozen=True)
class Request:
    """All that a recipe may ask for; most need the two numbers alone. `make_schedule` explains the others."""

    devices: int
    microbatches: int
    stages_per_device: int | None  # None: the recipe's own
    costs: Costs
    memory_limit: Number | str | None = None
    objective: Objective = "makespan"
    replicas: Sequence[int] | None = None
    minibatches: int = 8
    time_limit: float = 60.0

    @property
    def limit(self) -> Number | None:
        """The memory limit in the unit of `activation`; "2x" is twice the peak of 1f1b with these costs."""
        if self.memory_limit is None:
            return None
        text = self.memory_limit.strip() if isinstance(self.memory_limit, str) else ""
        try:
            value = float(text.removesuffix("x")) if isinstance(self.memory_limit, str) else self.memory_limit
        except ValueError:
            raise ConfigError(
                f"memory limit {text[:40]!r} is neither a number nor a multiple of 1f1b's peak such as 2x"
            ) from None
        if not math.isfinite(value) or value <= 0:
            raise ConfigError(f"memory limit is {float(value):g}, but it must be a number above 0")
        if not text.endswith("x"):
            return value
        usual = line.one_forward_one_backward(self.devices, self.microbatches)
        return value * max(peaks(usual, self.costs.merged(self.devices)))

    @property
    def placements(self) -> list[Placement]:
        """1 stage per device is a line; 2 are a vee or a loop; None is all of these where the costs allow. The vee
        first: it is rarely worse, and what it reaches may rule out the others.
        """
        K, asked = self.devices, self.stages_per_device
        lengths = {len(value) for value in vars(self.costs).values() if isinstance(value, tuple)}
        if asked is None and not (lengths <= {K} or lengths <= {2 * K}):
            raise ConfigError(f"costs list {sorted(lengths)} stages, but auto places {K} in a line or {2 * K} in a vee")
        every = ((2, placing.vee(K)), (1, placing.line(K)), (2, placing.loop(K, 2)))
        allowed = [placed for each, placed in every if asked == each or (asked is None and lengths <= {each * K})]
        return list(dict.fromkeys(allowed))
