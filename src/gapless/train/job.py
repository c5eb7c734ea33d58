"""What a config describes, built: a model, its loss, its data and its optimizer; the plan for it; and its pipeline."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.pipeline.planning import make_plan
from gapless.plan.plan import Plan
from gapless.plan.planner import Memory, Planned, Progress, planned
from gapless.plan.profile.measure import cores
from gapless.plan.profile.profile import ANY_HOST, Host
from gapless.plan.profile.task import Optimizer
from gapless.plan.search.search_options import ANYTHING, SearchOptions
from gapless.stage.batch import microbatch as mb
from gapless.stage.devices import torch_devices
from gapless.train import host_memory
from gapless.train.config import user_code as own
from gapless.train.config.config import Config
from gapless.train.config.keys import Part
from gapless.train.data.feed import Batch, Feed, make_feeds, share_of, with_shape
from gapless.train.learning_rate import Scheduled, scheduled
from gapless.train.torchrun import Ranks
from gapless.units import show_count

_LEFT_OUT = {"next_token": -100, "cross_entropy": -100, "nll_loss": -100, "translation": 0}  # targets


@dataclass(frozen=True)
class Job:
    """All that is needed to train. `first` is a batch of all samples, to plan with."""

    config: Config
    model: nn.Module | Sequence[Callable[..., Any]]
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Optimizer
    devices: Sequence[torch.device]
    scheduler: Scheduled
    first: Batch
    batches: Feed
    validation: Feed | None
    ranks: Ranks = Ranks()  # noqa: RUF009

    def planned(
        self,
        *,
        wanted: SearchOptions = ANYTHING,
        memory: Memory | None = None,
        speeds: Sequence[float] | None = None,
        seconds: float = 10.0,
        host: Host = ANY_HOST,
        progress: Progress | None = None,
    ) -> Planned:
        """Measured and planned, with what the config allows where nothing is given."""
        wanted = self._wanted(wanted)
        with self._measuring():
            return planned(
                self.model,
                *self.first,
                devices=self.devices,
                wanted=wanted,
                loss=self.loss,
                memory=self.config.pipeline.memory if memory is None else memory,
                speeds=speeds,
                optimizer=self.optimizer,
                seconds=seconds,
                progress=progress,
                name=self.config.model.name,
                host=host,
            )

    def made_plan(
        self, progress: Progress | None = None, *, microbatches: int | None = None, seconds: float = 10.0
    ) -> Plan:
        """The best one for these devices; of ranks the first one measures, and all get the same."""
        wanted = replace(ANYTHING, microbatches=microbatches)
        if self.ranks.mesh is None:
            return self.planned(wanted=wanted, seconds=seconds, progress=progress).found.best
        wanted = self._wanted(wanted)
        with self._measuring():
            return make_plan(
                self.model,
                *share_of(self.first, 0, self.ranks.replicas),
                mesh=self.ranks.mesh,
                loss=self.loss,
                memory=self.config.pipeline.memory,
                microbatches=wanted.microbatches,
                schedules=wanted.schedules,
                optimizer=self.optimizer,
                offload=wanted.offload,
                overlap=wanted.overlap,
                seconds=seconds,
                progress=progress,
                timeout=self.config.pipeline.timeout,
            )

    def _wanted(self, wanted: SearchOptions) -> SearchOptions:
        layout = self.config.pipeline
        wanted = replace(wanted, overlap=wanted.overlap or layout.overlap is True)
        if layout.plan == "auto":
            wanted = replace(
                wanted,
                microbatches=wanted.microbatches or layout.microbatches,
                schedules=wanted.schedules or (None if layout.schedule is None else [layout.schedule]),
                offload="activations" if wanted.offload == "none" != layout.offload else wanted.offload,
            )
        self._check(wanted.microbatches)
        return wanted

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """What is drawn there, training does not miss."""
        what = f"measuring the model{with_shape(self.first)}"
        with own.importable(self.config), own.told(what), torch.random.fork_rng(devices=[]):
            yield

    def fits(self, plan: Plan) -> bool:
        """Whether it was made for the devices that are here."""
        if self.ranks.mesh is not None:
            return (plan.mesh.replicas, plan.num_devices) == (self.ranks.replicas, self.config.num_devices)
        there = plan.num_devices if plan.searched is None else plan.searched.devices  # some may stay idle
        return (plan.mesh.replicas, there) == (1, self.config.num_devices)

    def plan(self) -> Plan | None:
        """The one in a file that the config names, if it does."""
        asked = self.config.pipeline.plan
        if asked is None:
            return None
        plan = Plan.read(self.config.folder / asked)
        layout, minibatch = self.config.pipeline, self.config.data.minibatch
        if plan.minibatch != minibatch:
            raise ConfigError(
                f"the plan {asked} is for a minibatch of {plan.minibatch}, but data.minibatch is {minibatch}: make a "
                "plan for that size"
            )
        if layout.schedule not in (None, plan.recipe):
            raise ConfigError(
                f"schedule is {layout.schedule}, but the plan {asked} has {plan.recipe}: leave it out, or make "
                "another plan"
            )
        return plan

    def pipeline(self, plan: Plan | None) -> Pipeline:
        layout = self.config.pipeline
        if plan is None and layout.microbatches is None:
            raise ConfigError(
                "pipeline.microbatches is missing: set the number of parts that a minibatch is cut into, such as "
                "8, or plan = 'auto'"
            )
        self._check(layout.microbatches)
        where: dict[str, Any] = {"devices": self.devices} if self.ranks.mesh is None else {"mesh": self.ranks.mesh}
        with own.importable(self.config), own.told("cutting the model"):
            return Pipeline(
                self.model,
                **where,
                schedule=plan or layout.schedule,
                microbatches=layout.microbatches,
                stages_per_device=layout.stages_per_device,
                partition=layout.partition,
                remat=layout.remat or "none",
                offload="none" if layout.plan == "auto" else layout.offload,  # the plan says what leaves
                loss=self.loss,
                loss_weight=loss_weight(self.config.loss),
                seed=self.config.train.seed,
                example=mb.split(self.first[0], self.ranks.replicas)[0],
                tied="exact",
                intra_op_threads=threads_of(self.config),
                timeout=layout.timeout,
            )

    def _check(self, microbatches: int | None) -> None:
        replicas, size = self.ranks.replicas, self.config.data.minibatch // self.ranks.replicas
        if microbatches is not None and microbatches > size:
            shared = "" if replicas == 1 else f" of a replica, of which there are {replicas},"
            raise ConfigError(
                f"a minibatch{shared} of {show_count(size, 'sample')} can't be cut into {microbatches} microbatches: "
                "use fewer"
            )


def threads_of(config: Config) -> int:
    """CPU threads of a device: the same in one process and on ranks, so that their bits are."""
    return config.pipeline.threads or max(1, cores() // config.num_devices)


def build(config: Config, ranks: Ranks | None = None) -> Job:
    """Always the same for the same config and the same files beside it: the seed is set first."""
    ranks = Ranks() if ranks is None else ranks
    devices = torch_devices(config.pipeline.devices) if ranks.mesh is None else []
    files: own.Files = {}
    loss = None
    if config.loss is not None:
        loss = own.load(config.loss, config, files)
        if arguments := own.fitting(loss, config.loss, None, None):
            loss = partial(loss, **arguments)
    optimizer = _optimizer(config, files)
    host_memory.check_batch(config)
    sketch = host_memory.sketched(config, files)
    make = own.load(config.model, config, files)
    torch.manual_seed(config.train.seed)
    model = own.call(make, config.model, config, **({} if config.model.is_own else {"folder": config.folder}))
    if not isinstance(model, nn.Module | list | tuple):
        raise ConfigError(
            f"model: {config.model.name} returned {model!r:.40}, but it must return a module or a list of layers"
        )
    _check_lengths(config)
    vocab = _vocabulary(config, model)
    feed, validation = make_feeds(config, files, share=ranks.share, vocab=vocab)
    first = feed.peek()
    host_memory.check_activations(config, sketch, first[0])
    return Job(config, model, loss, optimizer, devices, scheduled(config, files), first, feed, validation, ranks)


def _check_lengths(config: Config) -> None:
    """A gpt has no positions for longer sequences."""
    most = config.model.arguments.get("context", 256)
    for part in (config.data, config.validation):
        if config.model.name == "gpt" and part is not None and not part.is_own:
            length = part.arguments.get("context", 64)
            if isinstance(length, int) and length > most:
                raise ConfigError(
                    f"{part.key}.arguments.context is {length}, but gpt takes up to {most} tokens: make it at most "
                    "model.arguments.context"
                )


def _vocabulary(config: Config, model: Any) -> int | None:
    """How many tokens the model knows, where that is known."""
    if config.model.name == "gpt":
        return int(config.model.arguments.get("vocab", 256))
    if config.model.name == "huggingface":
        return int(model.config.vocab_size)
    return None


def loss_weight(loss: Part | None) -> mb.LossWeight:
    """What microbatches count: a mean over targets some of which are left out counts the others."""
    if loss is None or loss.is_own:
        return None
    if loss.arguments.get("reduction") == "sum":
        return "sum"
    left_out = loss.arguments.get("ignore_index", _LEFT_OUT.get(loss.name))
    return None if left_out is None else lambda target: (target != left_out).sum()


def _optimizer(config: Config, files: own.Files) -> Optimizer:
    """Tried at once, so that what it refuses is told before anything is measured."""
    part = config.optimizer
    make = own.load(part, config, files)

    def made(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        found = own.call(make, part, config, parameters)
        if not isinstance(found, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer: {part.name} returned {found!r:.40}, but it must return a torch.optim.Optimizer"
            )
        return found

    made([nn.Parameter(torch.zeros(1, 1))])
    return made
