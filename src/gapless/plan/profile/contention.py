"""What devices cost each other where they share one machine: the interpreter's lock, caches, memory.

Stages are measured alone and beside each other, and how many times as long they take then is one number for each kind
of action. Where there are more devices than processors, they take turns.
"""

from dataclasses import dataclass, replace

from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate


@dataclass(frozen=True)
class Contention:
    """How many times as long a forward (F, R), a whole backward (B), and one in halves (I, W) take beside others.

    at_once  how many devices the machine has processors for; where more want to run they take turns. None: for all
    """

    forward: float = 1.0
    backward: float = 1.0
    halves: float = 1.0
    at_once: float | None = None

    def costs(self, alone: Costs, schedule: Schedule) -> Costs:
        """Those of stages that run this schedule, from the costs of each stage alone."""
        if self == ALONE or schedule.num_devices == 1:
            return alone
        turns = 1.0
        if self.at_once is not None:
            timeline = simulate(schedule, alone)
            turns = max(1.0, float(sum(timeline.busy) / timeline.makespan) / self.at_once)
        durations = alone.durations(schedule.placement)

        def longer(kind: Kind, times: float) -> tuple[float, ...]:
            return tuple(turns * times * float(seconds) for seconds in durations[kind])

        return replace(
            alone,
            forward=longer(Kind.FORWARD, self.forward),
            recompute=longer(Kind.RECOMPUTE, self.forward),
            backward=longer(Kind.BACKWARD, self.backward),
            input_grad=longer(Kind.INPUT_GRAD, self.halves),
            weight_grad=longer(Kind.WEIGHT_GRAD, self.halves),
        )


ALONE = Contention()
