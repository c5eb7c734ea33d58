"""From a pipeline to a stream: one optimizer per stage, versions of the weights, and devices that flow."""

from collections.abc import Iterable, Mapping, MutableSet, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from gapless.errors import ConfigError
from gapless.guards.weights_and_gradients import WEIGHTS_ELSEWHERE
from gapless.guards.whole_model import MODEL_EDITS
from gapless.model.traced.capture import Captured
from gapless.pipeline.arguments.stream_arguments import (
    StreamArguments,
    check_asked,
    check_streamable,
    maker_of,
    optimizer_of,
    refuse_loose,
    scheduler_of,
)
from gapless.pipeline.options import Options
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.pipeline.saved.saved_stream import SavedStream
from gapless.pipeline.staged_model import StagedModel
from gapless.run.one_process import OneProcess
from gapless.run.streams.correction import check_predictable
from gapless.run.streams.replicas.replica_threads import pair_of
from gapless.run.streams.stream import Stream
from gapless.run.streams.stream_device import Fed, StreamDevice
from gapless.run.streams.thread_runner import ThreadRunner
from gapless.run.streams.updater import Updater
from gapless.run.streams.version_rule import VersionRule
from gapless.run.world import World
from gapless.schedule.placement import Placement
from gapless.schedule.recipes.head_start import forwards_ahead
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.minibatch import Minibatch, apart
from gapless.stage.batch.own_copies import own
from gapless.stage.batch.share import Share
from gapless.stage.shared.tie import Place
from gapless.stage.shared.weight_versions import Versions
from gapless.stage.stage import Stage
from gapless.units import show_count

if TYPE_CHECKING:
    from gapless.run.streams.rank_runner import RankRunner


def make_stream(
    world: World, staged: StagedModel, options: Options, asked: StreamArguments, others: MutableSet[Stream]
) -> Stream:
    """Checks what a stream can't do, and makes one that has trained on nothing yet."""
    optimizer, scheduler, vertical, clip, correction, lr, annealed_over, in_flight, split = asked
    recipe = options.schedules.streams
    if not recipe:
        raise ConfigError(
            "the schedule is synchronous: use step, or make the pipeline with schedule='pipedream' or '2bw'"
        )
    optimizer = maker_of(optimizer, correction, lr)
    check_streamable(staged, options)
    placement = staged.placement
    replicas = [len(cycle) for cycle in placement.cycles]
    in_turns = max(replicas) > 1
    check_asked(asked, recipe, in_turns=in_turns)
    ahead = forwards_ahead(replicas)
    model = SavedModel(world, staged, options)
    flow, names = _flow(world, placement), model.names()
    stages, kind = len(staged.partition), "2bw" if recipe == "2bw" else "vertical" if vertical else "stashing"
    devices: list[StreamDevice] = []

    def make(number: int, stage: Stage) -> None:
        parts = (*stage.layers, *([stage.loss] if stage.loss is not None else []))
        refuse_loose(parts, number)
        stage.draws_among_others()
        versions = Versions(parts, partial(_own, stage), names)
        trained = [each for each in versions.parameters if each.requires_grad]
        made = optimizer_of(optimizer, trained, number) if trained else None
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
        then = None if scheduler is None or made is None else scheduler_of(scheduler, made)
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
    saveable, under_way = partial(SavedStream, model), (in_flight or least) + replicas[0]
    stream = Stream(flow, devices, cut, lambda: world.call("streaming"), under_way, saveable)
    others.add(stream)
    return stream


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
    minibatch = Minibatch.cut(*own(inputs, target), count, *dims, needed=has_first or traced)
    prepared = _prepared(staged, minibatch, stream)
    if staged.stages is not made_of:
        raise MODEL_EDITS.refusal("the model was edited since the stream was made", "make a new stream")
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


def check_drained(streams: Iterable[Stream], *, whole: bool = False) -> None:
    """Whoever looks at the model means all of it at one minibatch; with `whole` also after a failure."""
    if any(stream.is_running for stream in streams):
        raise ConfigError("a stream is under way, and its stages are at different minibatches: drain() it first")
    for stream in streams:
        if whole and stream.is_broken:
            stream.check_whole()


def _refuse_stray(place: Place, *_: object) -> NoReturn:
    raise WEIGHTS_ELSEWHERE.refusal(
        f"a layer or the loss of stage {place[0]} uses weights of another stage, which are at another minibatch"
    )
