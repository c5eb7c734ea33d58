"""One process, a thread per device: there is nobody else to talk to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gapless.model.uses import tie, uses_of
from gapless.run.channels import ThreadChannels, Transport
from gapless.run.clip import clip_grad_norm
from gapless.run.execute import execute, measured
from gapless.run.lanes import Lane, make_lane
from gapless.run.program import Program
from gapless.run.team import make_team
from gapless.run.world import Evaluated, Gathering, OwnStages, Parts, Ran
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.placement import Placement
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.share import Share
from gapless.stage.shared.tie import Tie, Tied


class Lone:
    """A gathering of one."""

    ranks, place = (0,), 0

    def everywhere(self, own: Any) -> list[Any]:
        return [own]

    def note(self, doing: str) -> None:
        """Nobody waits."""


class OneProcess:
    """All devices are here. `lanes` and `channels` may be others than the usual, for a benchmark."""

    tied: Tied = "exact"
    replica, num_replicas = 0, 1
    one_process = True
    stopping = False  # nobody asks it to leave

    def __init__(
        self,
        devices: Sequence[torch.device],
        intra_op_threads: int | None = None,
        *,
        lanes: Sequence[Lane] | None = None,
        channels: Callable[[Schedule], Transport] = ThreadChannels,
    ) -> None:
        self.devices: Sequence[torch.device] = list(devices)
        self.here: Sequence[int] = range(len(self.devices))
        self.near = len(set(self.devices)) == len(self.devices)
        self.lanes = [make_lane(device) for device in self.devices] if lanes is None else lanes
        self._channels = channels
        self.team = make_team(self.here, intra_op_threads)
        self.ties: list[Tie] = []

    def making(self) -> AbstractContextManager[object]:
        """Nobody waits for it."""
        return nullcontext()

    def agree(self, facts: Mapping[str, Any], module: nn.Module | None = None, loss: Any = None) -> None:
        """There is nobody to agree with."""

    def adopt(self, module: nn.Module, stages: OwnStages, parts: Parts, placement: Placement, tied: Tied) -> None:
        for each in self.ties:
            each.release()
        devices = [self.devices[each] for each in placement.homes]
        self.ties = tie(module, stages, uses_of(parts), devices, tied)

    def program(
        self, schedule: Schedule, stages: OwnStages, loss: Evaluated, costs: Costs | None, *, recorded: bool
    ) -> Program:
        channels = self._channels(schedule)
        return Program(schedule, stages, self.lanes, loss, channels, here=self.here, recorded=recorded, costs=costs)

    @property
    def busy(self) -> bool:
        return self.team.busy

    def call(self, doing: str) -> AbstractContextManager[object]:
        return self.team.held()

    def weights(self, program: Program, inputs: Any, target: Any, counted: Weighed, share: Share) -> Sequence[float]:
        counted.check_kept()
        return share.shares(counted.numbers, sum(counted.numbers), summed=counted.summed)

    def of_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)]

    def run(self, program: Program, weights: Sequence[float]) -> Ran:
        if program.inference:
            execute(program, self.team)
            return Ran(program.losses, tuple(weights))
        for each in self.ties:
            with self.lanes[program.schedule.placement.homes[each.stages[0]]].entered():  # in its stream
                each.begin()
        execute(program, self.team)
        for each in self.ties:
            each.end()
        for stage in program.stages.values():
            stage.finish()
        return Ran(program.losses, tuple(weights), measured(program, "measured") if program.recorded else None)

    def holds(self, tensor: Tensor) -> bool:
        return True

    def state(self, module: nn.Module, whole: bool) -> dict[str, Any]:
        return module.state_dict()

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
        return module.load_state_dict(state, strict)

    def zero_grad(self, module: nn.Module, set_to_none: bool) -> None:
        module.zero_grad(set_to_none)

    def share_of(self, parameters: Sequence[nn.Parameter]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        return {*parameters}, {*parameters}

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        return clip_grad_norm(parameters, max_norm, norm_type)

    @contextmanager
    def gathered(self, doing: str) -> Iterator[Gathering]:
        with self.team.held():
            yield Lone()

    def described(self) -> Iterator[str]:
        return iter(())

    def close(self) -> None:
        self.team.close()
