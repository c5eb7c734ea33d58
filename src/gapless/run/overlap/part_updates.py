"""What a device does with its part of the optimizer: an update when its gradients are there, and another one if the
verdict says so.

    end of a row    norms are told; where the step before stood, it is stepped at once, else after the verdict
    at the verdict  steps stand, or are made anew; then forwards that have used the weights run again
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from gapless.guards.held_state import RESTARTED_FORWARDS
from gapless.run.overlap.optimizer_part import OptimizerPart, Setting
from gapless.run.overlap.verdict import Check, Findings, Verdict
from gapless.run.program import Program
from gapless.run.streams.buffer_rollback import BufferRollback
from gapless.schedule.timeline import Timeline
from gapless.stage.stage import Stage

Settled = Callable[[int, Verdict | None, Timeline | None], None]  # told of each step when it is


class Court(Protocol):
    """All devices of a pipeline, as one of them sees them."""

    check: Check

    def tell(self, step: int, norms: Mapping[int, Tensor], told: Findings) -> None:
        """This device's gradients. Does not wait."""

    def verdict(self, step: int) -> Verdict:
        """Waits until all devices have told theirs."""


class PartUpdates:
    """Of one device."""

    def __init__(self, court: Court, part: OptimizerPart, stages: Sequence[Stage]) -> None:
        self.court, self.part, self.stages = court, part, stages
        self._buffers = [BufferRollback() for _ in stages]
        self.due: int | None = None  # a step whose verdict is to come
        self.is_torn = False  # something was raised in the middle of carrying it out
        self.keeps_gradients = False  # for whoever looks at the step once it is made
        self._alone = True  # the next update waits for its verdict
        self._lost = False  # a loss that goes into it is not finite
        self._overflowed = False  # by the last verdict

    def start(self) -> None:
        """Steps come, whose layers are these."""
        for stage, buffers in zip(self.stages, self._buffers, strict=True):
            buffers.begin([*stage.layers, stage.loss])

    def rest(self) -> None:
        """Nothing is under way."""
        for stage in self.stages:
            stage.rest()

    def begin(self, step: int, program: Program) -> None:
        """Its first forward comes."""
        if self._overflowed and program.batch.weights_after_overflow:
            program.batch.weights = program.batch.weights_after_overflow
        for buffers in self._buffers:
            buffers.keep(step)

    def look_at(self, losses: Sequence[Tensor], weights: Sequence[float]) -> None:
        """Those of a minibatch that goes into the next update."""
        self._lost = self.court.check.loses(losses, weights) or self._lost

    def update(self, step: int, setting: Setting) -> Verdict | None:
        """All gradients of this device are there. Returns the verdict, if it was waited for."""
        self.part.begin(setting.groups)
        overflowed = setting.scale is not None and self.part.unscale(setting.scale)
        norms = self.part.norms() if self.court.check else {}
        self.court.tell(step, norms, Findings(any(stage.holds_state for stage in self.stages), self._lost, overflowed))
        self._lost = False
        self.due = step
        if self._alone:
            return self.settle()
        if not overflowed and not self.court.check.fails(norms):
            self.is_torn = True
            self.part.step()
            self.is_torn = False
        return None

    def settle(self) -> Verdict | None:
        """Carries out the verdict that is due, if there is one."""
        if self.due is None:
            return None
        verdict = self.court.verdict(self.due)
        self.is_torn = True
        self.part.settle(verdict)
        if not self.keeps_gradients:
            self.part.grads = {}
        self._alone, self._overflowed, self.due, self.is_torn = verdict.alone, verdict.overflowed, None, False
        return verdict

    def run_again(self, program: Program, device: int, step: int) -> None:
        """The forwards of this step that came before its verdict: they have used weights that did not stand."""
        if any(stage.holds_state for stage in self.stages):
            raise RESTARTED_FORWARDS.refusal(
                "a step was clipped or skipped after forwards of the next one had begun, in which a layer changed "
                "something for the first time that is not a buffer",
                f"{RESTARTED_FORWARDS.way_out}, or use pipe.step and optimizer.step() (in a config: overlap = false)",
            )
        program.drop_forwards(device)
        self.drop(step)
        self.begin(step, program)
        program.run_forwards(device)

    def drop(self, step: int) -> None:
        """Buffers are as before this one."""
        for buffers in self._buffers:
            buffers.put_back(step)

    def forget(self, step: int) -> None:
        """It has gone into the weights, on all devices."""
        for buffers in self._buffers:
            buffers.forget(step)
        self.part.forget()

    def undo(self) -> None:
        """Of what was not settled nothing is left."""
        self.due, self.is_torn, self._lost = None, False, False
        self.part.undo()
        self.part.drop_gradients()
