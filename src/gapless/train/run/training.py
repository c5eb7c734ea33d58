"""A run from its config to its report: what `gapless train` calls, in one process or on every rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from gapless.checkpoint.collection import Checkpoints
from gapless.errors import ConfigError
from gapless.pipeline.overlapped_training import OverlappedTraining
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.plan import Plan
from gapless.plan.planner import Progress
from gapless.schedule.recipes import find_recipe
from gapless.schedule.simulate import simulate
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.offload.optimizer_state import offload_optimizer
from gapless.train.config import user_code as own
from gapless.train.config.config import Config
from gapless.train.job import Job, build, threads_of
from gapless.train.run.evaluation import EarlyStop, evaluated
from gapless.train.run.interrupts import Interrupts
from gapless.train.run.metrics import Metrics, TensorBoard, WeightsAndBiases
from gapless.train.run.run_folder import RunFolder
from gapless.train.run.run_report import write_report
from gapless.train.run.saver import Saver
from gapless.train.run.step_monitor import StepMonitor
from gapless.train.run.trainer import Callback, Trainer
from gapless.train.torchrun import Ranks

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Training:
    """A run that is ready to begin."""

    config: Config
    folder: RunFolder
    job: Job
    plan: Plan | None
    pipe: Pipeline
    trainer: Trainer
    monitor: StepMonitor
    interrupts: Interrupts
    begun: int  # the step after which it goes on

    def add(self, callback: Callback) -> None:
        """Told after those that are there."""
        self.trainer.callbacks.append(callback)

    def run(self) -> None:
        """To its end, whatever that is; then the report is written."""
        try:
            self.trainer.run()
        except BaseException:
            with suppress(OSError):  # nothing hides what came first
                self._write_down()
            raise
        self._write_down()

    def _write_down(self) -> None:
        if self.job.ranks.first:
            if self.monitor.timelines:
                self.folder.keep_timelines(list(self.monitor.timelines))
            if self.config.run.report:
                write_report(self.folder)


@contextmanager
def prepared(
    config: Config, folder: RunFolder, ranks: Ranks, *, start: Path | None = None, progress: Progress | None = None
) -> Iterator[Training]:
    """Everything that a run needs, made in the order in which it can fail. A run that the folder holds goes on; `start`
    is a checkpoint of another one to begin with. Nothing is left behind of a run that is refused.
    """
    _check(config, ranks)
    ranks.together(partial(_check_writers, config))
    with ExitStack() as stack:
        missing = folder.missing if ranks.first else []
        stack.callback(_remove_empty, missing)
        if (held := ranks.together(partial(folder.open, config))) is not None:
            stack.callback(held.close)
        config = config.changed(threads=config.pipeline.threads or ranks.decided(folder.threads))
        threads = threads_of(config)
        stack.enter_context(intra_op_threads(threads))
        stack.enter_context(own.importable(config))
        if progress is not None:
            progress("making the model")
        job = build(config, ranks)
        plan = _plan(job, folder, progress)
        pipe = stack.enter_context(job.pipeline(plan))
        keys = config.checkpoint
        store = stack.enter_context(
            Checkpoints(folder.checkpoints, pipe, keep=keys.keep, best=int(keys.best), background=keys.background)
        )
        monitor, interrupts = StepMonitor(config.run.timeline, ranks), Interrupts(alone=ranks.mesh is None)
        trainer, early = make_trainer(config, job, pipe), EarlyStop(config.evaluate.patience)
        if plan is not None and plan.offload_optimizer:
            offload_optimizer(trainer.optimizer)
        saver = Saver(store, config, early, ranks)
        saver.go_on(trainer, job.batches, start if store.latest is None else None)
        ranks.together(partial(folder.say, config, pipe, threads, ranks.size))
        if plan is not None and config.pipeline.plan == "auto":
            ranks.together(partial(folder.keep_plan, plan))
        trainer.callbacks += [early, monitor, saver, interrupts]  # which hear a signal until all is saved
        if ranks.first:
            where = folder.where(pipe, threads, ranks.size)
            trainer.callbacks += _writers(config, folder, monitor, where)
        missing.clear()  # they hold a run now
        yield Training(config, folder, job, plan, pipe, trainer, monitor, interrupts, trainer.step)


def _plan(job: Job, folder: RunFolder, progress: Progress | None) -> Plan | None:
    """One that was made for the run is taken again when it goes on. On other devices it goes on with another one, which
    has as many microbatches: with others its numbers would be others.
    """
    if job.config.pipeline.plan != "auto":
        return job.plan()
    ranks, microbatches = job.ranks, None
    if ranks.decided(folder.has_checkpoints and folder.plan.is_file()):
        before = Plan.read(folder.plan)
        if job.fits(before):
            return before
        if before.mesh.replicas == ranks.replicas:
            microbatches = before.microbatches
    return job.made_plan(progress, microbatches=microbatches)


def _check(config: Config, ranks: Ranks) -> None:
    if ranks.mesh is not None and config.train.precision == "fp16":
        raise ConfigError(
            "train.precision is fp16, and its loss scaler must see the gradients of all ranks, which it does in one "
            "process only: use bf16, which needs no scaler, or run without torchrun"
        )
    schedule = config.pipeline.schedule
    if schedule is not None and not find_recipe(schedule).synchronous:
        raise ConfigError(
            f"pipeline.schedule is {schedule}, which updates weights inside the schedule and has no steps: choose one "
            "with a flush, or write a program with pipe.stream()"
        )
    if config.data.minibatch < ranks.replicas:
        raise ConfigError(
            f"data.minibatch is {config.data.minibatch}, but there are {ranks.replicas} replicas: make it larger"
        )


def _check_writers(config: Config) -> None:
    """What they need is installed, or said before anything is built."""
    if config.run.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError("run.tensorboard is true, but tensorboard is not installed: pip install tensorboard")
    if config.run.wandb is not None and find_spec("wandb") is None:
        raise ConfigError(f"run.wandb is {config.run.wandb!r}, but wandb is not installed: pip install wandb")


def _remove_empty(folders: Sequence[Path]) -> None:
    """Those that were made for a run in which nothing was written: it was refused."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def make_trainer(config: Config, job: Job, pipe: Pipeline) -> Trainer:
    """The loop, as the config asks for it."""
    optimizer = job.optimizer(list(pipe.parameters()))
    autocast = _autocast(config, pipe.devices)
    evaluate = None
    if job.validation is not None:
        evaluate = partial(evaluated, pipe, job.validation, config.evaluate.batches, autocast, job.ranks)
    scaler = None
    if config.train.precision == "fp16":
        scaler = torch.amp.GradScaler(pipe.devices[-1].type)
    scheduler = job.scheduler(optimizer)
    return Trainer(
        pipe,
        optimizer,
        job.batches,
        steps=config.train.steps,
        scheduler=scheduler,
        clip=config.train.clip,
        accumulate=config.train.accumulate,
        scaler=scaler,
        autocast=autocast,
        evaluate=evaluate,
        every=config.evaluate.every or 1,
        skip=config.train.skip,
        training=_overlapped(config, pipe, optimizer, scheduler),
    )


def _overlapped(config: Config, pipe: Pipeline, optimizer: Optimizer, scheduler: Any) -> OverlappedTraining | None:
    """The optimizer step that does not wait, where it is asked for, or is sure to run and may help. On GPUs, or within
    a limit, what it keeps of weights and state could be too much, autocast keeps casts of weights, and an optimizer
    that is not torch's may need all parameters at once.
    """
    make = partial(pipe.training, optimizer, max_norm=config.train.clip, scheduler=scheduler)
    if config.pipeline.overlap != "auto":
        return make() if config.pipeline.overlap else None
    own_step = type(optimizer).__module__.startswith("torch.optim.")
    known = {*pipe.parameters()}.issuperset(each for group in optimizer.param_groups for each in group["params"])
    plain = config.train.precision == "float32" and all(device.type == "cpu" for device in pipe.devices)
    timeline = simulate(pipe.schedule)
    if not (own_step and known and plain and config.pipeline.memory is None and timeline.span < timeline.makespan):
        return None
    try:
        return make()
    except ConfigError:
        return None


def _autocast(config: Config, devices: Sequence[torch.device]) -> Callable[[], AbstractContextManager[Any]]:
    low = _LOW.get(config.train.precision)
    if low is None:
        return nullcontext

    @contextmanager
    def cast() -> Iterator[None]:
        with ExitStack() as stack:
            for kind in sorted({device.type for device in devices}):
                stack.enter_context(torch.autocast(kind, dtype=low))
            yield

    return cast


def _writers(config: Config, folder: RunFolder, monitor: StepMonitor, where: dict[str, str]) -> list[Callback]:
    found: list[Callback] = [Metrics(folder.metrics, monitor, where)]
    asked = config.run.tensorboard
    if asked or (asked is None and find_spec("tensorboard") is not None):
        found.append(TensorBoard(folder.tensorboard, monitor))
    if config.run.wandb is not None:
        found.append(WeightsAndBiases(config.run.wandb, folder.path.name, config.as_json(), monitor))
    return found
