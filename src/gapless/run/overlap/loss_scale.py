"""A GradScaler whose verdicts come late: its next scale is known for either verdict before there is one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler

from gapless.errors import ConfigError


class LossScale(NamedTuple):
    """The state of a GradScaler, as a value."""

    state: Mapping[str, Any]

    @property
    def value(self) -> float:
        return float(self.state["scale"])

    def scale(self, weight: Tensor) -> Tensor:
        """As a GradScaler scales."""
        return weight * self.value

    def after(self, *, overflowed: bool) -> "LossScale":
        """As `GradScaler.update` leaves it."""
        scale, tracker = torch.tensor(self.value), torch.tensor(self.state["_growth_tracker"], dtype=torch.int32)
        rule = (self.state[key] for key in ("growth_factor", "backoff_factor", "growth_interval"))
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflowed)), *rule)
        return LossScale({**self.state, "scale": scale.item(), "_growth_tracker": tracker.item()})


class LateScaler:
    """A GradScaler, and its state after the last settled step."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.now = LossScale(scaler.state_dict())

    def ahead(self, *, updates: bool) -> tuple[LossScale, LossScale | None]:
        """The scale of the next step, and another one for it if the update that is under way, if any, overflows."""
        now = LossScale(self._scaler.state_dict())
        if not updates:
            self.now = now
            return now, None
        if now != self.now:
            raise ConfigError("the scaler was changed while a step is under way: call training.settle() before that")
        return now.after(overflowed=False), now.after(overflowed=True)

    def settle(self, *, overflowed: bool) -> None:
        """The next step is settled."""
        self.now = self.now.after(overflowed=overflowed)
        self._scaler.load_state_dict(dict(self.now.state))
