"""A model as a pipeline has it: cut into stages, those of this process made, and programs that run them.

A sequence is cut when the pipeline is made, any other model when its first batch comes. A user may edit the model
between two steps; the stages follow.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from gapless.model.layers import Layer, Layers, check_sharded, cost_of
from gapless.model.materialise import homes_in, materialise, release
from gapless.model.model_edits import Makeup
from gapless.model.traced.capture import Captured, find_loss, own_loss
from gapless.model.uses import Uses, shared_buffers, uses_of
from gapless.pipeline.arguments.checks import check_compiled, check_data, check_uncounted, layers_per_stage, room_for
from gapless.pipeline.edits import check_stay, taken_over
from gapless.pipeline.options import Options
from gapless.pipeline.programs import Programs
from gapless.pipeline.saved.partial_state import PartialState
from gapless.run.program import Program
from gapless.run.world import Ran, World
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.simulate import simulate
from gapless.stage.batch.loss_counts import Weighed, is_known, weighed
from gapless.stage.batch.minibatch import Minibatch
from gapless.stage.batch.plain import sum_in_order
from gapless.stage.compiled import compiled, undeferred
from gapless.stage.graphs.graphed import GraphedStage
from gapless.stage.guards.blind_spots import unwatched
from gapless.stage.guards.stored_tensors import Stored
from gapless.stage.stage import Stage
from gapless.units import show_count


class StagedModel:
    """`layers` are given by hand, or None; without them a model that is no sequence is traced."""

    def __init__(
        self,
        world: World,
        schedule: Schedule,
        options: Options,
        model: Any,
        *,
        layers: Sequence[Layer] | None,
        partition: Sequence[int] | None,
        traced: bool,
    ) -> None:
        self._world, self.schedule, self._options = world, schedule, options
        self._homes = schedule.placement.homes
        self.placement = options.schedules.placement_of(schedule)
        self._here = [stage for stage, cycle in enumerate(self.placement.cycles) if {*cycle} & {*world.here}]
        self._devices = [world.devices[device] for device in self._homes]
        self.last_device = self._devices[-1]
        # Inputs are used in this process, and outputs and losses made in it; of replicas that is the first of each.
        self.has_first, self.has_last = self._homes[0] in world.here, self._homes[-1] in world.here
        self._is_whole = len(world.here) == len(world.devices)
        self._programs = Programs(world, schedule, options)
        self.stages: dict[int, Stage] = {}  # those of this process, by their numbers
        self._partial = PartialState(nn.Module(), world.holds)
        self.uses: Uses = {}  # which stages use a parameter
        self._split = False  # every backward, whatever the schedule says
        self._called: Makeup | None = None  # what the stages were made of; None: of what was tried in vain
        self._edition: Any = None  # of a traced model, for which the stages were made
        self.partition: tuple[int, ...] = ()
        self.model: Layers | Captured
        check_sharded(model, traced=traced)
        if traced:
            check_data(nn.Module() if options.init else model, "give init=, or read it with gapless.hf.load")
            if options.cuts is None:
                check_uncounted(partition, model)
            self.model = Captured(model, self._devices, options.cuts, movable=self._is_whole, eager=not options.graphs)
        else:
            self.model = Layers(model, layers)
            with room_for(schedule, len(world.devices), "cut the model into smaller layers"):
                self.partition = layers_per_stage(self.model, schedule.num_stages, partition)
        world.agree(self._facts(), self.module, options.loss)
        if not traced:
            self._make_stages()

    @property
    def module(self) -> nn.Module:
        """The plain model."""
        return self.model.module

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether it is of this process. Of a new one in a traced model that is known when it is traced."""
        new = isinstance(self.model, Captured) and self.model.edition is not self._edition
        return (new and parameter not in self.uses) or self._world.holds(parameter)

    def described(self) -> Iterator[str]:
        """What it is, and a line for each stage."""
        schedule, count = self.schedule, self._options.microbatches
        bubble = f"predicted bubble {100 * float(simulate(schedule, self._options.schedules.costs).bubble):.1f}%"
        if self._options.schedules.streams:  # what is simulated is one minibatch of many
            bubble = "no bubble in a long stream"
        counts = {"device": len(self._world.devices), "stage": schedule.num_stages, "microbatch": count}
        sizes = ", ".join(show_count(number, word) for word, number in counts.items())
        yield f"Pipeline: {schedule.name or 'schedule'}, {sizes}, {bubble}"
        first = 0
        for stage, count in enumerate(self.partition):
            device = self._homes[stage]
            size = sum(cost_of(layer) - 1 for layer in self.model.layers[first : first + count])
            notes = ""
            if (work := self.stages.get(stage)) is not None:
                notes = f", remat {work.remat}" if work.remat != "none" else ""
                if out := sum(each == stage for each, _ in schedule.offloaded):
                    notes += f", {out} of {show_count(schedule.num_microbatches, 'microbatch')} offloaded"
                if (calls := work.calls).num_compiled:
                    notes += f", {calls.num_compiled} compiled in {calls.compile_seconds:.1f} s"
                if work.split and calls.compile_seconds and (those := undeferred(work.layers, calls.waited)):
                    notes += (
                        f" (weight gradients not deferred: layers {', '.join(str(first + each) for each in those)})"
                    )
                notes += f", {work.likenesses.described}" if isinstance(work, GraphedStage) else ""
            name = f"layers {first} to {first + count - 1}" if count > 1 else f"layer {first}"
            if isinstance(self.model, Captured):
                names = self.model.edition.names
                name = names[stage] if names else "to be traced again, since the model was edited"
            where = f"stage {stage} on device {device} ({self._world.devices[device]})"
            if len(cycle := self.placement.cycles[stage]) > 1:
                where = f"stage {stage} on devices {cycle[0]} to {cycle[-1]} ({self._world.devices[device]} each)"
            yield f"  {where}: {name}, {show_count(size, 'parameter')}{notes}"
            first += count
        if not self.stages:
            yield "  to be traced and cut when the first batch comes"
        others = {"processes": not self._world.one_process, "replicas": self._world.num_replicas > 1}
        yield from (f"  {each}" for each in unwatched([*self.stages.values()], **others))

    def batch_of(self, inputs: Any, target: Any, *, cut: bool) -> Minibatch:
        """What a caller gives, in microbatches; without `cut` it is a list of them already."""
        dims, most = self._options.batch_dims, self._options.microbatches
        if not cut:
            return Minibatch.given(inputs, target, most, dims, weighed=self._options.loss_weight is not None)
        needed = self.has_first or isinstance(self.model, Captured)
        return Minibatch.cut(inputs, target, most, dims, self._options.target_dims, needed=needed)

    def prepared(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Microbatches as the first stage takes them. A module is traced and cut here, when a new kind comes."""
        model = self.model
        if isinstance(model, Layers):
            return model.prepare(parts)
        known, edition = model.num_traces, model.edition
        with room_for(self.schedule, len(self._world.devices), "give smaller layers with layers="):
            prepared = model.prepare(parts)
        if model.num_traces != known or edition is not self._edition:
            model.settle(self._here)
            if edition is not self._edition:
                if self._edition is not None:  # others have noticed the same edit
                    check_compiled(model.module, traced=True)
                    self._world.agree(self._facts())
                self.partition = (1,) * self.schedule.num_stages
                self._make_stages()
                self._edition = edition
            else:
                self._adopt(self._parts())
        return prepared

    def knows(self, parts: Sequence[Any]) -> bool:
        """Whether `prepared` would trace nothing."""
        return isinstance(self.model, Layers) or self.model.knows(parts)

    def split(self) -> None:
        """All stages may run the two halves of their backwards apart from now on."""
        if not self._split:
            self._split = True
            self._make_stages()

    def weighed(self, batch: Minibatch, prepared: Sequence[Any]) -> Weighed:
        """What each microbatch counts."""
        options = self._options
        if isinstance(self.model, Captured) and options.loss is own_loss:
            return self.model.weighed(prepared, batch, options.loss_weight)
        return weighed(options.loss, options.loss_weight, batch)

    def merged(self, batch: Minibatch | None, outputs: Sequence[Any], ran: Ran) -> Any:
        """The outputs of the minibatch, where they are and are wanted. The loss that the model has put among them is
        that of the minibatch, and not of a microbatch.
        """
        if batch is None or not self.has_last:
            return None
        own = find_loss(outputs[0]) if self._options.loss is own_loss and ran.losses else None
        return batch.merged(outputs, {} if own is None else {id(own): sum_in_order(ran.losses, ran.weights)})

    def program(self, microbatches: int, *, inference: bool, recorded: bool = False, turn: int = 0) -> Program:
        """For so many microbatches; made once. `turn` as in `Programs`."""
        return self._programs.of(self.stages, microbatches, inference=inference, recorded=recorded, turn=turn)

    @property
    def is_new(self) -> bool:
        """Whether the next step makes stages first: of a model that was edited, or has none yet."""
        if isinstance(self.model, Captured):
            self.model.notice()
            if self.model.edition is not self._edition:
                return True
        return not self.stages or self._called is None or not self._called.same()

    def follow(self) -> None:
        """Takes over what was edited in the model since the last step."""
        if isinstance(self.model, Captured):
            self.model.notice()
        if not self.stages or (self._called is not None and self._called.same()):
            return
        before, partition = self.model, self.partition
        try:
            if isinstance(before, Layers):
                self.model = now = before.again()
                self.partition = taken_over(before, partition, now, movable=self._is_whole)
                if uses_of(self._parts()) != self.uses:
                    self._world.agree(self._facts())
            self._make_stages()
        except BaseException:
            self.model, self.partition, self._called = before, partition, None
            raise

    def _make_stages(self) -> None:
        parts = self._parts()
        if self.uses and not self._is_whole:
            names = {each: name for name, each in self.module.named_parameters()}
            check_stay(self.uses, uses_of(parts), self._homes, names)
        self._called = None
        self._programs.clear()
        self.stages = self._made()
        self._adopt(parts)
        self._partial.end()
        self._partial = PartialState(self.module, self._world.holds)
        model, loss = self.model, self._options.loss  # a method in their place would hold the pipeline
        self._called = Makeup(lambda: [*model.called(), loss])

    def _made(self) -> dict[int, Stage]:
        """The stages of this process, on their devices; layers of others are let go of."""
        model, options, schedule = self.model, self._options, self.schedule
        parts, remat = self._layers(), options.schedules.remat_of(schedule.num_stages)
        halves = {action.stage for action in schedule.actions if action.kind is Kind.WEIGHT_GRAD}
        elsewhere = [layer for stage, layers in enumerate(parts) if stage not in self._here for layer in layers]
        if isinstance(model, Captured):
            stored = Stored(never_set=model.never_set)
        else:
            here = {number for stage in self._here for number in self._numbers(stage)}
            others = {number: part for number, part in enumerate(model.layers) if number not in here}
            if len(parts) - 1 not in self._here:
                others[len(model.layers)] = options.loss
            stored = Stored(model.module, elsewhere=others)
        stages = {}
        for stage in self._here:
            layers, device = parts[stage], self._devices[stage]
            if options.init is not None:
                homes = (*homes_in(layers), *(() if stage else model.unused()))
                materialise(model.module, homes, device, options.init)
            for layer in (each for each in layers if isinstance(each, nn.Module)):
                check_data(layer)
                layer.to(device)
            # A graph knows one version of the weights, and a stream has several.
            graphed = options.graphs and device.type == "cuda" and not options.schedules.streams
            make = partial(GraphedStage, tried=options.graphs == "auto") if graphed else Stage
            stages[stage] = make(
                compiled(layers, options.compiler, split=self._split or stage in halves),
                first_layer=self._numbers(stage).start,
                seed=options.seed,
                remat=remat[stage],
                split=self._split or stage in halves,
                loss=options.loss if stage == len(parts) - 1 else None,
                spread=stage == 0 and isinstance(model, Layers),
                batchnorm=options.batchnorm,
                # Replica r has microbatches r M to r M + M - 1, with the random numbers of these.
                first_microbatch=self._world.replica * options.microbatches,
                stored=stored,
            )
        if len(parts) - 1 in stages and not (options.loss_weight or options.loss is own_loss or is_known(options.loss)):
            stages[len(parts) - 1].watch_divisors()
        shared = shared_buffers(model.module, self._parts())
        for made in stages.values():
            made.share_buffers(shared)
        if isinstance(model, Layers):  # a traced module may have to be traced again
            release(elsewhere, [part for stage in stages.values() for part in (*stage.layers, stage.loss)])
        return stages

    def _adopt(self, parts: list[list[Any]]) -> None:
        self._world.adopt(self.module, self.stages, parts, self.placement, self._options.tied)
        self.uses = uses_of(parts)

    def _parts(self) -> list[list[Any]]:
        """What each stage calls, wherever it is."""
        parts = self._layers()
        return [*parts[:-1], [*parts[-1], self._options.loss]]

    def _layers(self) -> list[list[Any]]:
        return [self.model.layers[start:end] for start, end in pairwise([0, *accumulate(self.partition)])]

    def _numbers(self, stage: int) -> range:
        """Of its layers."""
        start = sum(self.partition[:stage])
        return range(start, start + self.partition[stage])

    def _facts(self) -> dict[str, Any]:
        return self._options.facts(self.schedule, self.partition, self.module)
