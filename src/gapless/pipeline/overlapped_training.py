"""Training whose optimizer step does not wait: `Pipeline.training`.

training = pipe.training(optimizer, max_norm=1.0, scheduler=scheduler)
for x, y in loader:
    result = training.step(x, y)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gapless.errors import ConfigError
from gapless.model.uses import own_parameters
from gapless.pipeline.arguments.checks import check_step, scaled
from gapless.pipeline.arguments.habits import batch_of
from gapless.pipeline.arguments.training_arguments import Asked, check_parameters, check_training
from gapless.pipeline.arguments.training_habits import TrainingHabits, refuse
from gapless.pipeline.options import Options
from gapless.pipeline.result import PendingResult, Result
from gapless.pipeline.short_tracebacks import short_tracebacks
from gapless.pipeline.staged_model import StagedModel
from gapless.run.one_process import OneProcess
from gapless.run.overlap.loss_scale import LateScaler
from gapless.run.overlap.optimizer_part import Groups, OptimizerPart, Setting, check_parts, groups_now, merge_groups
from gapless.run.overlap.part_updates import Court, PartUpdates
from gapless.run.overlap.thread_steps import ThreadSteps
from gapless.run.overlap.verdict import Check, Verdict
from gapless.run.program import Program
from gapless.run.world import Ran, World
from gapless.schedule.timeline import Timeline
from gapless.stage.autocast import casts_are_kept
from gapless.stage.batch.own_copies import own
from gapless.stage.batch.share import Share
from gapless.stage.settings import settings

if TYPE_CHECKING:
    from gapless.run.overlap.rank_steps import RankSteps


class Given(NamedTuple):
    """A step that is ready to run."""

    program: Program
    weights: Sequence[float]
    result: Callable[[Ran], Result]  # what a user gets of what it has computed


class StepMaker(Protocol):
    """The pipeline."""

    steps: int
    timeline: bool

    def _goes_on(self, inputs: Any, target: Any, cut: bool) -> bool:
        """Nothing of the model is new, and no batch of a new kind comes."""

    def _given(
        self, inputs: Any, target: Any, share: Share, cut: bool, outputs: bool, scaler: Any = None, turn: int = 0
    ) -> Given: ...


class OverlappedTraining:
    """What `Pipeline.training` returns: steps of a model and its optimizer that do not wait for each other."""

    def __init__(
        self, pipe: StepMaker, world: World, staged: StagedModel, options: Options, optimizer: Optimizer, asked: Asked
    ) -> None:
        options.schedules.check_steps()
        check_training(optimizer, asked)
        self._pipe, self._world, self._staged, self._loss = pipe, world, staged, options.loss
        self._optimizer, self._scheduler = optimizer, asked.scheduler
        self._scaler = LateScaler(asked.scaler) if asked.scaler is not None and asked.scaler.is_enabled() else None
        self._steps = self._made(Check(asked.max_norm, asked.skip_nonfinite))
        self._stages: Any = None  # for which parts were made
        self._under_way: dict[int, tuple[PendingResult, Groups, bool]] = {}  # and whether they update
        self._settings: tuple[Any, ...] = ()
        self._looks = False
        self._groups: Groups = ()  # of the last update
        # Torch's own take each parameter by itself.
        self._untried = not type(optimizer).__module__.startswith("torch.optim.") and len(world.devices) > 1
        self._hooks = [
            optimizer.register_step_pre_hook(refuse),
            optimizer.register_state_dict_pre_hook(lambda _: self.settle()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        ]
        self._habits = TrainingHabits(optimizer, asked.scheduler, self._used, self._settle_here)

    def _made(self, check: Check) -> "ThreadSteps | RankSteps":
        if isinstance(self._world, OneProcess):
            return ThreadSteps(self._world, check, self._settled)
        from gapless.run.overlap.rank_steps import make_rank_steps

        return make_rank_steps(self._world, check, self._settled)

    @short_tracebacks
    def step(
        self,
        inputs: Any = None,
        target: Any = None,
        *,
        weight: float | Fraction = 1.0,
        sync: bool = True,
        cut: bool = True,
        outputs: bool = False,
        **batch: Any,
    ) -> PendingResult:
        """Trains on a minibatch: forward, backward, clipping, the optimizer and its scheduler. It returns as soon as
        the step before this one is settled. Arguments are as in `Pipeline.step`; a step with `sync=False` adds its
        gradients to those of the next one, and updates nothing.
        """
        if "scaler" in batch:
            raise ConfigError("a step of training takes no scaler=: give it to pipe.training")
        inputs = batch_of(inputs, batch, "step")
        if self._world.one_process:  # threads use them when this has returned
            inputs, target = own(inputs, target)
        check_step(None, one_process=self._world.one_process)
        pipe, steps, number = self._pipe, self._steps, self._pipe.steps
        try:
            self._habits.check(under_way=bool(self._under_way))
            if steps.is_running and (settings() != self._settings or not pipe._goes_on(inputs, target, cut)):
                steps.settle()
            under_way = any(updates for _, _, updates in self._under_way.values())
            scale, other = (None, None) if self._scaler is None else self._scaler.ahead(updates=under_way)
            self._settings, known = settings(), self._stages is not None
            with steps.call():
                if not steps.is_running:  # layers that are running may have other parameters for a while
                    self._staged.follow()
                given = pipe._given(inputs, target, Share.of(weight, sync), cut, outputs, scale, turn=1 + number % 2)
                if other is not None:
                    again = scaled(given.weights, other, self._staged.last_device)
                    given.program.batch.weights_after_overflow = again
                self._adopt()
                ran = steps.run(number, given.program, given.weights, self._take_setting, updates=sync)
            rate = self._groups[0].get("lr") if self._groups else None
            pending = PendingResult(lambda: given.result(ran()), self.settle, rate)
            self._under_way[number] = pending, self._groups, sync
            pipe.steps = number + 1
            # In the first step layers tell what they draw; what draws from torch's own generators runs while nobody
            # else does. Casts that autocast keeps are of weights as they were.
            if (
                self._untried
                or not known
                or casts_are_kept()
                or any(each.calls.mode.alone for each in self._staged.stages.values())
            ):
                steps.settle()
        except BaseException as error:
            self._give_up(error)
            raise
        return pending

    def settle(self) -> None:
        """Waits until all steps have ended. The model, its optimizer and the scheduler are then as after the last one.
        Calls that read the model through the pipeline do this first.
        """
        try:
            self._steps.settle()
        except BaseException as error:
            self._give_up(error)
            raise

    def _used(self, module: nn.Module) -> None:
        """Somebody uses a module, whose weights and modes may be those of a step that is under way in other threads."""
        if self._steps.is_running and not self._looks:
            own = [each for each in (self._staged.module, self._loss) if isinstance(each, nn.Module)]
            if not {each for part in own for each in part.modules()}.isdisjoint(module.modules()):
                self.settle()

    def _settle_here(self) -> None:
        if self._under_way and not self._world.one_process:
            raise ConfigError(
                "the scheduler is a step behind while a step is under way: read result.rate, or call training.settle() "
                "on every rank first"
            )
        self.settle()

    def _beside(self, batches: Sequence[tuple[Any, Any]]) -> AbstractContextManager[object] | None:
        """A call while steps are under way; None if there are none, or these batches bring something new."""
        goes_on = self._under_way and all(self._pipe._goes_on(*each, cut=True) for each in batches)
        return self._steps.call() if goes_on else None

    @contextmanager
    def _looking(self) -> Iterator[dict[Parameter, int]]:
        """Bytes that are kept of each parameter, to undo a step; meanwhile uses of modules settle nothing."""
        self._looks = True
        try:
            yield {each: size for device in self._steps.devices for each, size in device.part.copies().items()}
        finally:
            self._looks = False

    def close(self) -> None:
        """Settles, and leaves the optimizer to its owner."""
        try:
            self.settle()
        finally:
            self._habits.end()
            while self._hooks:
                self._hooks.pop().remove()

    @property
    def is_open(self) -> bool:
        """Whether the optimizer is still stepped here."""
        return bool(self._hooks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def _before_load(self, *_: Any) -> None:
        self.settle()
        self._habits.loaded()

    def _take_setting(self) -> Setting:
        self._groups = groups_now(self._optimizer)
        return Setting(self._groups, None if self._scaler is None else self._scaler.now.value)

    def _adopt(self) -> None:
        """Takes stages over that are new."""
        staged = self._staged
        if self._stages is staged.stages:
            return
        parameters = [*staged.module.parameters(), *own_parameters(self._loss, staged.module)]
        check_parameters(self._optimizer, parameters, self._world, scaled=self._scaler is not None)
        mine, counted = self._world.share_of(parameters)
        self._steps.adopt(partial(self._parts, parameters, mine, counted), staged.placement.homes, len(parameters))
        self._stages = staged.stages
        for each in self._steps.devices:
            each.keeps_gradients = self._untried

    def _parts(
        self, parameters: Sequence[Parameter], mine: set[Parameter], counted: set[Parameter], court: Court
    ) -> list[PartUpdates]:
        """Of each device of this process. A parameter is where its first stage is."""
        staged, made = self._staged, []
        homes, stages = staged.placement.homes, staged.stages
        first = {each: min((s for s in staged.uses.get(each, ()) if s in stages), default=min(stages)) for each in mine}
        for device in self._world.here:
            own = {each for each in mine if homes[first[each]] == device}
            numbers = {n: each for n, each in enumerate(parameters) if each in counted and each in own}
            here = [stages[stage] for stage in stages if homes[stage] == device]
            for stage in here:
                stage.draws_among_others()
            made.append(PartUpdates(court, OptimizerPart(self._optimizer, own, numbers), here))
        return made

    def _settled(self, number: int, verdict: Verdict | None, timeline: Timeline | None) -> None:
        pending, groups, _ = self._under_way[number]
        pending.judge(verdict, timeline)
        if verdict is not None:
            parts = [each.part for each in self._steps.devices]
            merge_groups(self._optimizer, parts, groups)
            if self._untried and not verdict.skips:
                one = "use pipe.step and optimizer.step()" if self._world.one_process else "use devices= in one process"
                check_parts(self._optimizer, parts, groups, one)
                for each in self._steps.devices:
                    each.keeps_gradients = self._untried = False
        if verdict is not None and self._scaler is not None:
            self._scaler.settle(overflowed=verdict.overflowed)
        if verdict is not None and not verdict.skips and self._scheduler is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as its own step says to schedulers
            self._habits.step_scheduler()
        del self._under_way[number]

    def _give_up(self, error: BaseException) -> None:
        try:
            self._steps.give_up(error)
        finally:
            self._pipe.steps = min(self._under_way, default=self._pipe.steps)
            self._under_way.clear()
