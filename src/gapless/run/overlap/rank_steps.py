"""One rank: its step ends when its own device is done, and the verdict on it comes in the middle of the next one.

rank 0   step 3: ... W3 | norms ->  update | step 4: F4 F4 F4 V4 I4 ...
rank 1   step 3: ... W3 W3 | norms -> update | step 4: F4 F4 V4 I4 ...     V4: the norms of all ranks are there
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.run.clip import as_rows, from_rows
from gapless.run.overlap.optimizer_part import Setting
from gapless.run.overlap.part_updates import Court, PartUpdates, Settled
from gapless.run.overlap.verdict import Check, Findings, Verdict
from gapless.run.program import Program
from gapless.run.ranks.many_processes import ManyProcesses
from gapless.run.world import Ran, World


class RankCourt:
    """All ranks of a pipeline. Norms are added up in the background: each is of one rank."""

    def __init__(self, check: Check, world: ManyProcesses, parameters: int) -> None:
        self.check, self._world, self._parameters = check, world, parameters
        self._told: tuple[Tensor, Any] | None = None

    def tell(self, step: int, norms: Mapping[int, Tensor], told: Findings) -> None:
        found = as_rows(norms, self._parameters + len(told))
        found[0, self._parameters :] = torch.tensor(told)
        group = self._world.groups.pp
        self._told = found, None if group is None else group.allreduce([found])

    def verdict(self, step: int) -> Verdict:
        assert self._told is not None
        found, work = self._told
        if work is not None:
            self._world.links.await_all(work)
        norms = from_rows(found[:, : self._parameters], self._world.position.torch_device)
        return self.check.verdict(norms, Findings(*map(bool, found[0, self._parameters :])))


class RankSteps:
    """Of this rank. `settled` is called for each step when it is."""

    is_running = False  # nothing works between two calls

    def __init__(self, world: ManyProcesses, check: Check, settled: Settled) -> None:
        self._world, self._check, self._settled = world, check, settled
        self.devices: Sequence[PartUpdates] = ()
        self._judged: Verdict | None = None  # on the last step, if it was waited for
        self._steps: list[int] = []  # those that are not settled: one, and the one that is under way

    def adopt(self, make: Callable[[Court], Sequence[PartUpdates]], homes: Sequence[int], parameters: int) -> None:
        """Stages are new."""
        self.settle()
        self.devices = make(RankCourt(self._check, self._world, parameters))
        for each in self.devices:
            each.start()

    def call(self) -> AbstractContextManager[object]:
        """Around a step."""
        return self._world.call("in a step")

    def run(
        self, step: int, program: Program, weights: Sequence[float], setting: Callable[[], Setting], *, updates: bool
    ) -> Callable[[], Ran]:
        """This rank's part of a step; the verdict on the one before comes on the way."""
        [mine] = self.devices

        def at_verdict(device: int) -> None:
            verdict = self._settle() if len(self._steps) > 1 else None
            if verdict is not None and not verdict.stands:
                mine.run_again(program, device, step)

        program.at_verdict = at_verdict
        mine.begin(step, program)
        self._steps.append(step)
        try:
            ran = self._world.run(program, weights)
        finally:
            program.clear()
        mine.look_at(ran.losses, ran.weights)
        self._judged = mine.update(step, setting()) if updates else None
        return lambda: ran

    def settle(self) -> None:
        """The verdict on the last step is carried out."""
        if self._steps:
            self._settle()

    def _settle(self) -> Verdict | None:
        [mine], step = self.devices, self._steps[0]
        verdict = mine.settle()
        self._settled(step, verdict or self._judged, None)
        mine.forget(step)
        del self._steps[0]
        return verdict

    def give_up(self, error: BaseException) -> None:
        """What is not settled is undone."""
        for mine in self.devices if self._steps else ():
            mine.undo()
            mine.drop(self._steps[0])
            error.add_note(f"gapless: the model and its optimizer are as before step {self._steps[0]}")
        self._steps.clear()


def make_rank_steps(world: World, check: Check, settled: Settled) -> RankSteps:
    """Of a world of ranks."""
    assert isinstance(world, ManyProcesses)
    if world.links.static is not None and world.links.static.promised:
        raise ConfigError(
            "with static_shapes, ranks can't announce forwards that run again: leave it out, or use pipe.step and "
            "optimizer.step()"
        )
    return RankSteps(world, check, settled)
