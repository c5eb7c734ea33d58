"""From a pipeline to a stream: one optimizer per stage, versions of the weights, and devices that flow."""

from collections.abc import Callable, Iterable, Mapping, MutableSet, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gapless.errors import ConfigError
from gapless.model.capture import Captured
from gapless.pipeline.arguments import at_least_one, one_of
from gapless.pipeline.options import Options
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.pipeline.saved.saved_stream import SavedStream
from gapless.pipeline.staged_model import StagedModel
from gapless.run.one_process import OneProcess
from gapless.run.streams.correction import check_predictable
from gapless.run.streams.nesterov import DelayedNesterov
from gapless.run.streams.replicas.replica_threads import pair_of
from gapless.run.streams.stream import Stream
from gapless.run.streams.stream_device import Fed, StreamDevice
from gapless.run.streams.thread_runner import ThreadRunner
from gapless.run.streams.updater import Updater
from gapless.run.streams.version_rule import VersionRule
from gapless.run.world import World
from gapless.schedule.asynchronous.endless import forwards_ahead
from gapless.schedule.placement import Placement
from gapless.stage import microbatch as mb
from gapless.stage.minibatch import Minibatch, apart
from gapless.stage.share import Share
from gapless.stage.stage import Stage
from gapless.stage.tie import Place
from gapless.stage.versions import Versions
from gapless.units import show_count

if TYPE_CHECKING:
    from gapless.run.streams.rank_runner import RankRunner

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]
Correction = Literal["spectrain", "nesterov"]


class Asked(NamedTuple):
    """Of a stream, as `Pipeline.stream` takes it."""

    optimizer: MakeOptimizer | None
    scheduler: MakeScheduler | None
    vertical: bool
    clip: float | None
    correction: Correction | None
    lr: float | None
    lr_by_delay: int | None
    in_flight: int | None
    split: bool


def make_stream(
    world: World, staged: StagedModel, options: Options, asked: Asked, others: MutableSet[Stream]
) -> Stream:
    """Checks what a stream can't do, and makes one that has trained on nothing yet."""
    optimizer, scheduler, vertical, clip, correction, lr, annealed_over, in_flight, split = asked
    recipe = options.schedules.streams
    if not recipe:
        raise ConfigError(
            "the schedule is synchronous: use step, or make the pipeline with schedule='pipedream' or '2bw'"
        )
    optimizer = _maker(optimizer, correction, lr)
    _check(staged, options)
    placement = staged.placement
    replicas = [len(cycle) for cycle in placement.cycles]
    in_turns = max(replicas) > 1
    _check_asked(asked, recipe, in_turns=in_turns)
    ahead = forwards_ahead(replicas)
    flow, names = _flow(world, placement), _names(staged)
    stages, kind = len(staged.partition), "2bw" if recipe == "2bw" else "vertical" if vertical else "stashing"
    devices: list[StreamDevice] = []

    def make(number: int, stage: Stage) -> None:
        parts = (*stage.layers, *([stage.loss] if stage.loss is not None else []))
        _refuse_loose(parts, number)
        stage.draws_among_others()
        versions = Versions(parts, partial(_own, stage), names)
        trained = [each for each in versions.parameters if each.requires_grad]
        made = _optimizer(optimizer, trained, number) if trained else None
        rule = VersionRule(
            kind,  # type: ignore[arg-type]
            number,
            stages,
            ahead[number],
            options.microbatches,
            replicas=replicas[number] if in_turns else world.num_replicas,
            replica=placement.cycles[number].index(world.here[0]) if in_turns else world.replica,
            turns=tuple(replicas) if in_turns else (),
        )
        then = None if scheduler is None or made is None else _scheduler(scheduler, made)
        updater = Updater(number, rule.delay, made, then, clip, correction == "spectrain", annealed_over)
        if updater.ahead and made is not None:
            check_predictable(made)
        replicated = flow.replicas(versions.parameters)
        devices.append(StreamDevice(rule, stage, versions, flow.neighbours(number), updater, replicated))

    with world.call("making a stream"):
        fault = None
        try:
            if split:
                staged.split()
            for number, stage in staged.stages.items():
                make(number, stage)
        except Exception as error:  # which is of one stage, and others may have none
            fault = error
        facts = {name: value for name, value in asked._asdict().items() if name not in ("optimizer", "scheduler")}
        flow.meet(facts, fault)

    cut = partial(_cut, staged, staged.stages, options, others)
    least = -(-replicas[0] * (ahead[0] + 1) // options.microbatches)  # NOAM, in minibatches of all replicas
    saveable, under_way = partial(SavedStream, SavedModel(world, staged, options)), (in_flight or least) + replicas[0]
    stream = Stream(flow, devices, cut, lambda: world.call("streaming"), under_way, saveable)
    others.add(stream)
    return stream


def _check_asked(asked: Asked, recipe: str, *, in_turns: bool) -> None:
    """Each for itself, whatever the model is."""
    _, scheduler, vertical, clip, _, _, annealed_over, in_flight, split = asked
    if annealed_over is not None:
        at_least_one("lr_by_delay", annealed_over)
    if vertical and recipe != "pipedream":
        raise ConfigError(f"vertical=True is for pipedream, and the schedule is {recipe}: leave it out")
    if clip is not None and not (_is_number(clip) and clip > 0):
        raise ConfigError(f"clip is {clip!r}, but it must be a norm above 0")
    for word, value in (("vertical", vertical), ("split", split)):
        if not isinstance(value, bool):
            raise ConfigError(f"{word} is {value!r:.40}, but it must be True or False")
    if scheduler is not None and not callable(scheduler):
        raise ConfigError(
            "every stage has a scheduler of its own: pass a function that makes one, as scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        )
    if in_flight is not None:
        at_least_one("in_flight", in_flight)
    if vertical and in_turns:
        raise ConfigError(
            "vertical=True gives a minibatch one version at all stages, but stages with different replicas have made "
            "different updates: leave it out, or leave out replicas="
        )


def _flow(world: World, placement: Placement) -> "ThreadRunner | RankRunner":
    if isinstance(world, OneProcess):
        return ThreadRunner(world.lanes, world.team)
    from gapless.run.ranks.many_processes import ManyProcesses  # here alone: torch.distributed need not be there
    from gapless.run.streams.rank_runner import RankRunner

    if not isinstance(world, ManyProcesses):
        raise ConfigError(f"a stream can't run in a {type(world).__name__}: use devices= or mesh=")
    position = world.position
    if len(position.ring) != position.num_devices * position.num_replicas:
        raise ConfigError("a device of the mesh has several ranks (tp), which a stream can't use: leave out tp")
    return RankRunner(world, placement)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _maker(optimizer: Any, correction: Correction | None, lr: float | None) -> MakeOptimizer:
    if correction is not None:
        one_of("correction", correction, get_args(Correction))
    if correction == "nesterov":
        if lr is not None and not (_is_number(lr) and lr >= 0):
            raise ConfigError(f"lr is {lr!r:.40}, but it must be a number from 0 on")
        if optimizer is not None:
            raise ConfigError("correction='nesterov' is an optimizer of its own: leave optimizer= out, and give lr=")
        return DelayedNesterov if lr is None else partial(DelayedNesterov, lr=lr)
    if lr is not None:
        raise ConfigError("lr= is for correction='nesterov': give the learning rate to your optimizer")
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise ConfigError(
            "a stream has an optimizer for each stage, which it steps as soon as the stage's gradients are there: pass "
            "a function that makes one, as optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    made: MakeOptimizer = optimizer
    return made


def _check(staged: StagedModel, options: Options) -> None:
    if isinstance(staged.model, Captured) and not staged.stages:
        raise ConfigError(
            "the model is traced with its first batch, and a stream needs its stages before that: make the pipeline "
            "with example=inputs"
        )
    shared = [each for each, stages in staged.uses.items() if len(set(stages)) > 1]
    if shared:
        name = next((name for name, each in staged.module.named_parameters() if each is shared[0]), "a parameter")
        raise ConfigError(
            f"{name} is used by several stages, which update their weights at different times: untie it, or choose a "
            "partition that keeps its layers in one stage, or a schedule that is synchronous"
        )
    if options.graphs is True:
        raise ConfigError("CUDA graphs know one version of the weights, and a stream keeps several: leave out graphs=")
    if options.batchnorm == "deferred":
        raise ConfigError("batchnorm='deferred' waits for the end of a step, and a stream has none: use 'microbatch'")


def _cut(
    staged: StagedModel,
    made_of: Mapping[int, Stage],
    options: Options,
    streams: Iterable[Stream],
    batch: Any,
    stream: Stream,
) -> Sequence[Fed]:
    """What a loader gives, in microbatches, for a stream that was made of these stages."""
    if any(each.is_running for each in streams if each is not stream):
        raise ConfigError("another stream of this pipeline is under way: drain() it first")
    inputs, target = pair_of(batch, stream.fed)
    count, traced = options.microbatches, isinstance(staged.model, Captured)
    if (size := mb.batch_size(inputs, options.batch_dims)) < count:
        raise ConfigError(
            f"a minibatch of {show_count(size, 'sample')} can't be cut into {count} microbatches, and in a stream each "
            "must have as many: drop the last minibatch of the loader (drop_last=True)"
        )
    has_first, has_last = (stage in made_of for stage in (0, len(staged.partition) - 1))
    if stream.is_running and not (has_first or has_last or traced):
        return [Fed(None, None, 0.0)] * count  # that there is one is all that counts here
    dims = options.batch_dims, options.target_dims
    minibatch = Minibatch.cut(inputs, target, count, *dims, needed=has_first or traced)
    prepared = _prepared(staged, minibatch, stream)
    if staged.stages is not made_of:
        raise ConfigError("the model was edited since the stream was made: make a new stream")
    counted = staged.weighed(minibatch, prepared)
    counted.check_kept()
    weights = Share().shares(counted.numbers, sum(counted.numbers), summed=counted.summed)
    event = None
    if torch.cuda.is_initialized():
        event = torch.cuda.current_stream().record_event()
    return [Fed(*each, event) for each in zip(prepared, minibatch.targets, weights, strict=True)]


def _prepared(staged: StagedModel, minibatch: Minibatch, stream: Stream) -> Sequence[Any]:
    """Microbatches as the first stage takes them. A batch of a new kind is traced, and an edit of the model is noticed,
    when nothing is under way.
    """
    parts = [apart(part) for part in minibatch.parts]
    if not staged.knows(parts):
        stream.drain()
    if not stream.is_running:
        staged.follow()
    return staged.prepared(parts)


def _own(stage: Stage, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """A stage gets versions of its parameters, and may use no others."""
    stage.own(copies)
    stage.refuse_strays(_refuse_stray)


def _names(staged: StagedModel) -> dict[nn.Parameter, str]:
    """Of the model's parameters, and of those of a loss that is a module."""
    found = {each: name for name, each in staged.module.named_parameters()}
    for stage in staged.stages.values():
        if isinstance(stage.loss, nn.Module):
            found = {**{each: f"loss: {name}" for name, each in stage.loss.named_parameters()}, **found}
    return found


def check_drained(streams: Iterable[Stream], *, whole: bool = False) -> None:
    """Whoever looks at the model means all of it at one minibatch; with `whole` also after a failure."""
    if any(stream.is_running for stream in streams):
        raise ConfigError("a stream is under way, and its stages are at different minibatches: drain() it first")
    for stream in streams:
        if whole and stream.is_broken:
            stream.check_whole()


def _refuse_stray(place: Place, *_: object) -> NoReturn:
    raise ConfigError(
        f"a layer or the loss of stage {place[0]} uses weights of another stage, which are at another minibatch: use "
        "them in a layer of that stage, or, for a penalty on weights, give the optimizer weight_decay"
    )


def _refuse_loose(parts: Iterable[Any], stage: int) -> None:
    """Tensors that learn but are nobody's parameters have no versions, and no optimizer of a stage gets them."""
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    known = {parameter for module in modules for parameter in module._parameters.values()}
    for module in modules:
        for name, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            if name not in ("_parameters", "_buffers", "_modules") and any(
                isinstance(each, Tensor) and each.is_leaf and each.requires_grad and each not in known for each in held
            ):
                raise ConfigError(
                    f"{type(module).__name__}.{name} at stage {stage} has tensors that learn but are no parameters of "
                    "the model, so a stream has no versions of them: use nn.Parameter, or nn.ParameterList"
                )


def _optimizer(make: MakeOptimizer, parameters: list[nn.Parameter], stage: int) -> Optimizer:
    made = make(parameters)
    if not isinstance(made, Optimizer):
        raise ConfigError(f"optimizer= must make a torch.optim.Optimizer, but it made a {type(made).__name__}")
    if isinstance(made, torch.optim.LBFGS):
        raise ConfigError("LBFGS runs the model several times for an update, which a stream can't: use another")
    given = {id(each) for group in made.param_groups for each in group["params"]}
    if given != {id(each) for each in parameters}:
        raise ConfigError(
            f"the optimizer of stage {stage} has {len(given)} parameters, but the stage has {len(parameters)} others: "
            "make it from the parameters that it is given, and from all of them"
        )
    return made


def _scheduler(make: MakeScheduler, optimizer: Optimizer) -> Any:
    made = make(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric at every step, which the stages of a stream do not have: use a scheduler "
            "that counts"
        )
    if not hasattr(made, "step"):
        raise ConfigError(f"scheduler= must make a scheduler with step(), but it made a {type(made).__name__}")
    return made
