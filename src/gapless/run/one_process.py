"""One process, a thread per device: there is nobody else to talk to. `Ranks` has the same face."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gapless.model.uses import tie, uses_of
from gapless.run.channels import ThreadChannels, Transport
from gapless.run.clip import clip_grad_norm
from gapless.run.execute import measured
from gapless.run.lanes import make_lane
from gapless.run.program import Batch, Program
from gapless.schedule.action import Action, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.timeline import Timeline
from gapless.stage.counted import Weighed
from gapless.stage.share import Share
from gapless.stage.stage import Stage
from gapless.stage.tie import Tie, Tied


class Alone:
    """All devices are here."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.lanes = [make_lane(device) for device in self.devices]
        self.here: Sequence[int] = range(len(self.devices))
        self.tied: Tied = "exact"

    def first_microbatch(self, microbatches: int) -> int:
        return 0

    def adopt(
        self,
        module: nn.Module,
        stages: Mapping[int, Stage],
        parts: Sequence[Sequence[Any]],
        schedule: Schedule,
        tied: Tied,
    ) -> list[Tie]:
        """Ties what several stages share; `parts` are the layers of each stage."""
        devices = [self.devices[schedule.placement.device(stage, 0)] for stage in range(schedule.num_stages)]
        return tie(module, stages, uses_of(parts), devices, tied)

    def channels(self, schedule: Schedule) -> Transport:
        return ThreadChannels(schedule)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """With whom?"""

    def refuse(self, error: BaseException) -> None:
        """Nobody to tell."""

    def call(self, doing: str) -> AbstractContextManager[object]:
        """Nothing can go wrong elsewhere."""
        return nullcontext()

    def compare_weights(self, module: nn.Module) -> None:
        """With whose?"""

    def check_start(self) -> None:
        """There is one model."""

    def check_batch(
        self, inputs: Any, target: Any, numbers: Sequence[float], schedule: Schedule, *, inference: bool
    ) -> None:
        """There is one batch."""

    def made(self) -> None:
        """Nobody waits for it."""

    def running(self, program: Program, costs: Costs | None) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def stopping(self) -> bool:
        return False

    def weights(self, counted: Weighed, room: int, part: Share) -> Sequence[float]:
        counted.check_kept()
        return part.shares(counted.numbers, sum(counted.numbers), summed=counted.summed)

    def begin(self) -> None:
        """Nothing to set aside."""

    def after(self, schedule: Schedule) -> Mapping[Action, Callable[[Batch], None]]:
        return {}

    def end(self, ties: Sequence[Tie]) -> None:
        for each in ties:
            each.end()

    def give_up(self) -> None:
        """Nobody to tell."""

    def losses(
        self, schedule: Schedule, losses: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
        return tuple(losses), tuple(weights)

    def release(self) -> None:
        """Nothing to give back."""

    def check_scaler(self) -> None:
        """A scaler sees all gradients."""

    def holds(self, tensor: Tensor) -> bool:
        return True

    def state(self, module: nn.Module, whole: bool) -> dict[str, Any]:
        return module.state_dict()

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
        return module.load_state_dict(state, strict)

    def zero_grad(self, module: nn.Module, set_to_none: bool) -> None:
        module.zero_grad(set_to_none)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        return clip_grad_norm(parameters, max_norm, norm_type)

    def measured(self, program: Program) -> Timeline:
        return measured(program, "measured")

    def close(self) -> None:
        """Nothing to end but the threads, which are the team's."""
