"""The schedule that a pipeline runs, for any number of microbatches: made or taken, checked, and lowered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from gapless.errors import ConfigError, ScheduleError
from gapless.pipeline.arguments.checks import fitting_schedule, one_of
from gapless.plan.plan import Plan
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.placement import Placement, replicated
from gapless.schedule.recipes import find_recipe, make_schedule
from gapless.schedule.recipes.request import Request
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective
from gapless.stage.stage import Remat

Offload = Literal["none", "activations", "auto"]
_OFFLOAD = get_args(Offload)
Word = TypeVar("Word", bound=str)
_LARGE = 0.1  # a bubble


@dataclass(frozen=True)
class Schedules:
    """What was asked for."""

    asked: str | Schedule | Plan
    num_devices: int
    stages_per_device: int | None
    costs: Costs | None
    memory_limit: Number | str | None
    objective: Objective
    remat: Remat | Sequence[Remat]
    offload: Offload | Sequence[Offload] = "none"
    replicas: Sequence[int] | None = None  # of each stage, where these are on ranks of their own

    def __post_init__(self) -> None:
        if self.streams and self.memory_limit is not None:
            raise ConfigError(
                f"{self.streams} runs in streams, where a memory limit has no effect: leave out memory_limit="
            )
        if not isinstance(self.remat, Sequence):
            raise ConfigError(f"remat is {self.remat!r}, but it must be 'none', 'stage', 'layer', or a list of these")
        if self.offload == "none":
            return
        if not isinstance(self.offload, Sequence):
            raise ConfigError(f"offload is {self.offload!r}, but it must be one of {', '.join(_OFFLOAD)}, or a list")
        if self.streams:
            raise ConfigError(f"{self.streams} runs in streams, which keep their activations: leave out offload=")
        if self.offload == "auto" and self.memory_limit is None:
            raise ConfigError(
                "offload='auto' offloads what memory_limit= asks for: give one, or use offload='activations' for all "
                "that can leave without a wait"
            )
        for word in (self.offload,) if isinstance(self.offload, str) else self.offload:
            one_of("offload", word, ("none", "activations") if word != self.offload else _OFFLOAD)

    def made(self, microbatches: int) -> Schedule:
        """For so many, within the memory limit."""
        made, limit = self._made(microbatches), self._limit(microbatches)
        peak = max(map(float, simulate(made, self.costs).peak)) if limit is not None else 0.0
        if limit is not None and peak > float(limit) * (1 + 1e-9):
            ways = "use remat" if self.offload == "auto" else "use schedule='auto', offload='auto' or remat"
            raise ScheduleError(
                f"{made.name or 'the schedule'} holds {peak:g} on a device, in units of costs' activation, which is "
                f"above memory_limit={limit:g}: raise the limit, or {ways}"
            )
        return made

    def _limit(self, microbatches: int) -> Number | None:
        costs = self.costs or Costs()
        return Request(self.num_devices, microbatches, self.stages_per_device, costs, self.memory_limit).limit

    def _made(self, microbatches: int) -> Schedule:
        asked = self.asked
        if isinstance(asked, Plan):  # for another number of microbatches it is its recipe
            asked = asked.schedule if microbatches == asked.microbatches else asked.recipe
        if isinstance(asked, Schedule):
            schedule = fitting_schedule(asked, self.num_devices, microbatches)
        else:
            if asked == "pipedream" and microbatches != 1:
                raise ScheduleError(
                    f"pipedream takes minibatches whole, so microbatches is 1 and not {microbatches}: set it to 1, or "
                    "choose 2bw"
                )
            schedule = make_schedule(
                asked,
                devices=self.num_devices,
                microbatches=microbatches,
                minibatches=1,
                stages_per_device=self.stages_per_device,
                costs=self.costs,
                memory_limit=self.memory_limit,
                objective=self.objective,
                replicas=self.replicas,
            )
        again = [stage for stage, kind in enumerate(self.remat_of(schedule.num_stages)) if kind == "stage"]
        if Kind.RECOMPUTE in schedule.kinds:  # it says itself what is recomputed
            again = []
        passes = Passes(fuse=True, recompute=again, offload=self.offloaded_of(schedule.num_stages))
        if self.offload == "auto":
            passes = replace(passes, memory_limit=self._limit(microbatches))
        return lowered(schedule, self.costs, passes)

    def default_microbatches(self) -> int:
        """Four for each device, or as few of these as leave a bubble below a tenth. A smaller batch has fewer."""
        asked, devices = self.asked, self.num_devices
        if isinstance(asked, Schedule | Plan):
            return asked.num_microbatches if isinstance(asked, Schedule) else asked.microbatches
        if self.streams:
            return 1 if asked == "pipedream" else devices
        if find_recipe(asked).is_searched:  # which takes its time for every number
            return 2 * devices
        each = (times * devices for times in range(1, 4))
        enough = (count for count in each if simulate(self._made(count), self.costs).bubble < _LARGE)
        return next(enough, 4 * devices)

    def placement_of(self, schedule: Schedule) -> Placement:
        """Where its stages are: a schedule of few microbatches does not name all replicas."""
        return schedule.placement if self.replicas is None else replicated(self.replicas)

    @property
    def streams(self) -> str:
        """The recipe, if it has no end: it updates weights on the way."""
        asked = self.asked.recipe if isinstance(self.asked, Plan) else self.asked
        return asked if isinstance(asked, str) and not find_recipe(asked).synchronous else ""

    def check_steps(self) -> None:
        """Refuses what has no steps."""
        if self.streams:
            raise ConfigError(
                f"{self.streams} updates weights inside the schedule, so it has no steps: train with pipe.stream()"
            )

    def offloaded_of(self, num_stages: int) -> list[int]:
        """The stages whose activations may leave."""
        asked = self.asked.offload if isinstance(self.asked, Plan) and self.offload == "none" else self.offload
        return [stage for stage, word in enumerate(_of_each("offload", asked, num_stages)) if word != "none"]

    def remat_of(self, num_stages: int) -> list[Remat]:
        """Of each stage."""
        remat = _of_each("remat", self.remat, num_stages)
        if isinstance(self.asked, Schedule):  # one with R in it recomputes, whatever else was asked for
            for stage in {stage for stage, _ in self.asked.recomputed}:
                remat[stage] = "stage"
        return remat


def _of_each(name: str, words: Word | Sequence[Word], num_stages: int) -> list[Word]:
    """One word for each stage, as they are listed, or one for all."""
    found: list[Word] = [words] * num_stages if isinstance(words, str) else list(words)
    if len(found) != num_stages:
        raise ConfigError(
            f"{name} lists {len(found)} stages, but the schedule has {num_stages}: list one word for each stage, or "
            "give one word for all"
        )
    return found
