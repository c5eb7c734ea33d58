"""The facade: a model, its devices and a schedule, as one object that trains.

pipe = gapless.Pipeline(model, devices=4, schedule="zb-v", microbatches=16, loss=F.cross_entropy)
optimizer = torch.optim.AdamW(pipe.parameters())
for x, y in loader:
    result = pipe.step(x, y)
    optimizer.step(); optimizer.zero_grad()
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gapless.model.layers import Layer, check_no_hooks_for_all, is_sequence
from gapless.model.materialise import Init
from gapless.model.traced.capture import own_loss
from gapless.pipeline.arguments import checks as arguments
from gapless.pipeline.arguments.habits import batch_of, check_model, explained, pairs_told
from gapless.pipeline.arguments.schedule_arguments import ScheduleArguments
from gapless.pipeline.arguments.stream_arguments import Correction, MakeOptimizer, MakeScheduler, StreamArguments
from gapless.pipeline.held_model import HeldModel, in_eval_mode
from gapless.pipeline.options import Loss, Options
from gapless.pipeline.overlapped_training import Given
from gapless.pipeline.result import Result
from gapless.pipeline.schedules import Offload, Schedules
from gapless.pipeline.short_tracebacks import public_calls
from gapless.pipeline.staged_model import StagedModel
from gapless.pipeline.streaming import check_drained, make_stream
from gapless.plan.asynchronous.replicate import Replication
from gapless.plan.plan import Plan
from gapless.run.program import Program
from gapless.run.streams.stream import Stream
from gapless.run.team import close_with
from gapless.run.world import Carriage, Ran, StaticShapesWord, TransportName, World
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.timeline import Objective
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.minibatch import Minibatch, apart
from gapless.stage.batch.share import Share
from gapless.stage.compiled import compiler_of, uncompiled
from gapless.stage.devices import Devices
from gapless.stage.graphs.graphed import Graphs
from gapless.stage.norm.running_statistics import BatchNorm
from gapless.stage.shared.tie import Tied
from gapless.stage.stage import Remat

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@public_calls("Pipeline")
class Pipeline(HeldModel):
    """A model cut into stages that work at the same time, with the gradients of training on one device.

    model              an nn.Sequential, a list of layers, or any module that torch.export can trace
    devices            a number, "cuda" for all GPUs, or a list of torch devices: one process, a thread for each device
    mesh               instead of `devices`, under torchrun: a torch DeviceMesh with a dimension `pp` and, optionally,
                       `dp` and `tp`. Every rank makes the same calls
    schedule           a name from `gapless schedules`, a Schedule, a Plan (sets microbatches, partition, remat, costs)
                       or a Replication (partition, replicas). Default: 1f1b; on GPUs zb-v if stages would be equal
    microbatches       parts of a minibatch; by default four per device, or fewer if the bubble is then below 10%
    loss               loss(outputs, target), which returns a scalar. Without it the model returns its own loss: as
                       `.loss`, as `["loss"]`, or as a scalar
    stages_per_device  the default is what the schedule needs
    partition          layers per stage; by default balanced by parameters. A traced model is cut by estimated times
    replicas           only for pipedream, under a mesh with `pp` alone: how many ranks run each stage. They take turns
    costs              used by schedules that are made from costs, and to decide between a whole and a split backward
    memory_limit       for `auto`, `optimal` and offload="auto": the most a device may hold, in units of `activation`
    objective          only for `auto` and `optimal`: minimise "makespan" or "span"
    seed               sets all random numbers in the layers, together with the step, the microbatch and the layer
    remat              recompute activations: "none", "stage", "layer", or a list with one of these per stage
    offload            activations kept in host memory: "none", "activations" for all whose copies delay nothing, a
                       list with one of these per stage, or "auto" for as many as `memory_limit` requires
    loss_weight        how much each microbatch counts. None: by its samples, or by the targets that count where the
                       loss ignores some. "sum": the loss is a sum. Or a function of the target
    batchnorm          when running statistics are updated: "microbatch" (as in plain torch), "deferred" (once per
                       minibatch) or "error" (batch norm raises an error)
    tied               how gradients of a parameter that several stages use are added: "exact" in the order of plain
                       training, or "summed" once per step, the default under a mesh
    init               values for a model on the meta device: a function of a module and its name, "reset_parameters",
                       a mapping from names to tensors, or a .safetensors file
    compile            True, or options of torch.compile, for every layer or piece; a compiled model keeps its options
    layers             for a module that can't be traced: the list of callables that make up the model
    example            inputs to trace the model with right away; otherwise the first batch is used
    batch_dims         which dimension of each input is the batch, if not the first
    target_dims        the same for targets
    intra_op_threads   threads of each CPU device; by default the caller's threads are shared among the devices
    timeline           record every action of a step. You may change `pipe.timeline` between steps, on all ranks alike
    timeout            under a mesh: seconds without a heartbeat or progress of a rank before all ranks give up
    transport          under a mesh: "auto", "memory" (within one host), "nccl" or "gloo"
    static_shapes      under a mesh of GPUs: hosts do not wait for messages whose shapes follow from the batch's. True
                       promises that all steps have the shapes of the first one, "auto" finds out, False always waits
    graphs             on GPUs: run actions as CUDA graphs. True, False, or "auto": where they are faster and fit
    """

    @explained
    def __init__(
        self,
        model: nn.Module | Sequence[Callable[..., Any]],
        *,
        devices: Devices | World | None = None,
        mesh: "DeviceMesh | None" = None,
        microbatches: int | None = None,
        loss: Loss | None = None,
        schedule: str | Schedule | Plan | Replication | None = None,
        stages_per_device: int | None = None,
        partition: Sequence[int] | None = None,
        replicas: Sequence[int] | None = None,
        costs: Costs | None = None,
        memory_limit: Number | str | None = None,
        objective: Objective = "makespan",
        seed: int = 0,
        remat: Remat | Sequence[Remat] = "none",
        offload: Offload | Sequence[Offload] = "none",
        loss_weight: mb.LossWeight = None,
        batchnorm: BatchNorm = "microbatch",
        tied: Tied | None = None,
        compile: bool | Mapping[str, Any] = False,
        init: Init | None = None,
        layers: Sequence[Layer] | None = None,
        example: Any = None,
        batch_dims: Any = None,
        target_dims: Any = None,
        intra_op_threads: int | None = None,
        timeline: bool = False,
        timeout: float = 600.0,
        transport: TransportName = "auto",
        static_shapes: StaticShapesWord = "auto",
        graphs: Graphs = "auto",
    ) -> None:
        check_model(model)
        carriage = Carriage(transport, static_shapes)
        self._world = world = arguments.world_of(devices, mesh, timeout, intra_op_threads, carriage, schedule)
        self.devices, self._close = world.devices, close_with(self, world.close)
        self.seed, self.timeline, self.steps = seed, timeline, 0  # random numbers depend on the steps done so far
        self._nothing, self._streams, count = nn.Parameter(torch.empty(0)), weakref.WeakSet(), len(self.devices)
        with arguments.closed_if_refused(self._close), self._world.making():
            arguments.check_options(schedule, loss, loss_weight)
            model, compiler = uncompiled(model)
            traced = layers is None and not is_sequence(model)
            arguments.check_compiled(model, traced=traced)
            asked = ScheduleArguments(schedule, microbatches, partition, replicas, remat, costs, stages_per_device)
            asked = asked.settled(model, layers, world, traced)
            schedule, microbatches, partition, replicas, remat, costs, each = asked
            assert not isinstance(schedule, Replication | None)
            schedules = Schedules(schedule, count, each, costs, memory_limit, objective, remat, offload, replicas)
            microbatches = schedules.default_microbatches() if microbatches is None else microbatches
            self._options = Options(
                schedules,
                arguments.at_least_one("microbatches", microbatches),
                own_loss if loss is None else loss,
                loss_weight,
                seed,
                batchnorm,
                arguments.one_of("tied", self._world.tied if tied is None else tied, ("exact", "summed")),
                compiler_of(compile) or compiler,
                getattr(model, "gapless_weights", None) if init is None else init,
                schedule.cuts if isinstance(schedule, Plan) else None,
                batch_dims,
                target_dims,
                timeline,
                arguments.graphs_of(graphs, self.devices),
            )
            self.microbatches = self._options.microbatches
            self.schedule = self._options.schedules.made(self.microbatches)
            self._staged = StagedModel(
                self._world, self.schedule, self._options, model, layers=layers, partition=partition, traced=traced
            )
            if traced and example is not None:
                self._staged.prepared([apart(mb.split(example, self.microbatches, batch_dims)[0])])
        self._called_as_a_whole = None if layers is not None else model

    def step(
        self,
        inputs: Any = None,
        target: Any = None,
        *,
        weight: float | Fraction = 1.0,
        sync: bool = True,
        cut: bool = True,
        outputs: bool = False,
        scaler: Any = None,
        **batch: Any,
    ) -> Result:
        """Runs forward and backward of a minibatch. Gradients are added to `.grad`; step the optimizer yourself.

        inputs   a tensor, a tuple (positional arguments of the model) or a dict (keyword arguments)
        batch    the same as keywords: `step(**batch)`
        target   what the loss compares with; leave it out if the model returns its own loss
        weight   for a minibatch spread over several steps: this step's share of it. Its losses are multiplied by it
                 (`shares` computes it)
        sync     for such steps with replicas (`dp`): False in all but the last, which exchanges the gradients
        cut      False if inputs and target are lists of ready-made microbatches, each with its own shapes
        outputs  also return the model's outputs
        scaler   a torch.amp.GradScaler, which scales the losses
        """
        inputs = batch_of(inputs, batch, "step")
        self._options.schedules.check_steps()
        arguments.check_step(scaler, one_process=self._world.one_process)
        self._settle()
        with self._world.call("in a step"), pairs_told(inputs, target):  # what is refused is told to the other ranks
            self._staged.follow()
            result = self._run(self._given(inputs, target, Share.of(weight, sync), cut, outputs, scaler))
            self.steps += 1
        return result

    def _given(
        self, inputs: Any, target: Any, share: Share, cut: bool, outputs: bool, scaler: Any = None, turn: int = 0
    ) -> Given:
        cuts = self._batch(inputs, target, cut)
        prepared = self._staged.prepared([apart(part) for part in cuts.parts])
        counted = self._staged.weighed(cuts, prepared)
        program = self._staged.program(len(cuts.parts), inference=False, recorded=self.timeline, turn=turn)
        weights = self._world.weights(program, cuts.inputs, cuts.target, counted, share)
        factors = arguments.scaled(weights, scaler, self._staged.last_device)
        program.give(prepared, cuts.targets, factors, step=self.steps, want_outputs=outputs)
        return Given(program, weights, partial(self._result, program, cuts if outputs else None, counted))

    def _goes_on(self, inputs: Any, target: Any, cut: bool) -> bool:
        return not self._staged.is_new and self._staged.knows(self._batch(inputs, target, cut).parts)

    @explained
    def stream(
        self,
        *,
        optimizer: MakeOptimizer | None = None,
        scheduler: MakeScheduler | None = None,
        vertical: bool = False,
        clip: float | None = None,
        correction: Correction | None = None,
        lr: float | None = None,
        lr_by_delay: int | None = None,
        in_flight: int | None = None,
        split: bool = False,
    ) -> Stream:
        """Trains without a flush, for `pipedream` and `2bw`: each stage updates its weights once it has gradients.

        optimizer    makes an optimizer from the parameters of a stage
        scheduler    makes a learning-rate scheduler from that optimizer; stepped after each update
        vertical     vertical sync: a minibatch uses weights of the same version on all stages
        clip         the largest gradient norm of a stage
        correction   "spectrain" or "nesterov" (which has its own optimizer): compensate for old weights
        lr           the learning rate of `correction="nesterov"`
        lr_by_delay  for this many updates, lower the learning rate of early stages (PipeMare)
        in_flight    how many minibatches are in flight; by default as many as keep all stages busy
        split        compute weight gradients after input gradients, so that the previous stage waits less
        """
        self._follow()
        asked = StreamArguments(optimizer, scheduler, vertical, clip, correction, lr, lr_by_delay, in_flight, split)
        stream = make_stream(self._world, self._staged, self._options, asked, self._streams)
        stream.owner = self
        return stream

    def evaluate(
        self, inputs: Any = None, target: Any = None, *, cut: bool = True, outputs: bool = True, **batch: Any
    ) -> Result:
        """Outputs, and the loss if there is a target, in eval mode and without gradients. `cut` is as in `step`."""
        inputs = batch_of(inputs, batch, "evaluate")
        check_drained(self._streams)
        self._settle()
        has_loss = target is not None or self._options.loss is own_loss
        with self._world.call("evaluating"), pairs_told(inputs, target):
            cuts = self._batch(inputs, target, cut)
            self._staged.follow()
            with in_eval_mode(self._staged.module):
                with torch.no_grad():
                    prepared = self._staged.prepared(cuts.parts)
                counted = self._staged.weighed(cuts, prepared) if has_loss else Weighed([*map(float, cuts.sizes)])
                program = self._staged.program(len(cuts.parts), inference=True)
                weights = self._world.weights(program, cuts.inputs, cuts.target, counted, Share())
                program.give(prepared, cuts.targets if has_loss else ())
                result = partial(self._result, program, cuts if outputs else None, counted)
                return self._run(Given(program, weights, result))

    def _batch(self, inputs: Any, target: Any, cut: bool) -> Minibatch:
        check_no_hooks_for_all(self._called_as_a_whole)
        return self._staged.batch_of(inputs, target, cut=cut)

    def _run(self, given: Given) -> Result:
        try:
            return given.result(self._world.run(given.program, given.weights))
        finally:
            given.program.clear()

    def _result(self, program: Program, wanted: Minibatch | None, counted: Weighed, ran: Ran) -> Result:
        """`wanted`: the batch whose outputs are."""
        merged = self._staged.merged(wanted, program.batch.outputs, ran)
        number = None if counted.summed else float(sum(counted.numbers))
        return Result(ran.losses, ran.weights if ran.losses else (), merged, ran.timeline, number)

    def __call__(self, inputs: Any = None, target: Any = None, *, outputs: bool = True, **batch: Any) -> Result:
        """As `evaluate`: `pipe(x).outputs` are the model's. To train, call `step`."""
        return self.evaluate(inputs, target, outputs=outputs, **batch)
