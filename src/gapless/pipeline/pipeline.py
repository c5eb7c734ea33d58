"""The facade: a model, its devices and a schedule, as one object that trains.

pipe = gapless.Pipeline(model, devices=4, schedule="zb-v", microbatches=16, loss=F.cross_entropy)
optimizer = torch.optim.AdamW(pipe.parameters())
for x, y in loader:
    result = pipe.step(x, y)
    optimizer.step(); optimizer.zero_grad()
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, PartitionError
from gapless.model.capture import Captured, find_loss, own_loss
from gapless.model.layers import Layer, Layers, check_no_hooks_for_all, is_sequence
from gapless.model.makeup import Makeup
from gapless.model.materialise import Init
from gapless.model.uses import Uses, uses_of
from gapless.pipeline.agreed import described, named, told_to_all
from gapless.pipeline.arguments import (
    at_least_one,
    check_compiled,
    check_cuts,
    check_data,
    check_options,
    check_plan,
    check_uncounted,
    layers_per_stage,
    one_of,
    room_for,
    stages_per_device_of,
    world_of,
)
from gapless.pipeline.edits import check_stay, followed
from gapless.pipeline.result import Result
from gapless.pipeline.schedules import Schedules
from gapless.pipeline.stages import layers_of, make_stages, warn_of_unsplit
from gapless.plan.plan import Plan
from gapless.run.execute import execute
from gapless.run.program import Program
from gapless.run.team import Team, close_with
from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Objective
from gapless.stage import microbatch as mb
from gapless.stage.batchnorm import BatchNorm
from gapless.stage.compiled import compiler_of, uncompiled
from gapless.stage.counted import Weighed, weighed
from gapless.stage.devices import Devices
from gapless.stage.share import Share
from gapless.stage.stage import Remat, Stage
from gapless.stage.tie import Tie, Tied

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Loss = Callable[[Any, Any], Tensor]


class Pipeline:
    """A model cut into stages, on devices that work at the same time, with the gradients of plain training.

    model              an nn.Sequential, a list of layers, or any module that torch.export can trace
    devices            how many, "cuda" for all GPUs, or a list of torch devices (one may be there several times): one
                       process, a thread for each
    mesh               instead of devices, one process for each, under torchrun: a torch DeviceMesh with a dimension pp,
                       and dp and tp if wanted; every rank makes the same calls
    schedule           a name from `gapless schedules`, a Schedule, or a Plan, which brings microbatches, partition,
                       remat and costs
    microbatches       into how many parts a minibatch is cut
    loss               loss(outputs, target), a scalar; without it the model's own: its `.loss`, `["loss"]` or scalar
    stages_per_device  by default what the schedule needs
    partition          layers per stage; by default balanced by parameters
    costs              for schedules that are made from costs, and for the choice between a B and I W
    memory_limit       for `auto`
    seed               of everything random in the layers, together with step, microbatch and layer
    remat              "none", "stage", "layer", or a list with one of these per stage
    loss_weight        what a microbatch counts: None for samples, or the targets that torch's losses and the model's
                       own do not leave out; "sum" for a loss that is a sum; or a function of the target
    batchnorm          its running statistics: "microbatch" as torch moves them, "deferred" once for a minibatch, or
                       "error"
    tied               parameters that several stages use: "exact" adds gradients as plain training does, "summed" once
                       per step, which is the default under a mesh
    init               values for a model on the meta device: a function of a module and its name, "reset_parameters",
                       a mapping from names to tensors, or a .safetensors file
    compile            True, or options of torch.compile: every layer is compiled, or every piece of a traced model; by
                       default as the model was, if torch.compile made it
    layers             of a module that can't be traced: callables that together are the model
    example            inputs to trace the model with, now; by default the first batch, when it comes
    batch_dims, target_dims   where inputs and targets are cut, if not along the first dimension
    intra_op_threads   of a CPU device; by default the caller's, shared among the devices
    timeline           measure every step
    timeout            under a mesh, seconds without a sign of life from a rank, or without any rank computing anything,
                       after which all give up
    """

    @told_to_all
    def __init__(
        self,
        model: nn.Module | Sequence[Callable[..., Any]],
        *,
        devices: Devices | None = None,
        mesh: "DeviceMesh | None" = None,
        microbatches: int | None = None,
        loss: Loss | None = None,
        schedule: str | Schedule | Plan = "1f1b",
        stages_per_device: int | None = None,
        partition: Sequence[int] | None = None,
        costs: Costs | None = None,
        memory_limit: Number | str | None = None,
        objective: Objective = "makespan",
        seed: int = 0,
        remat: Remat | Sequence[Remat] = "none",
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
    ) -> None:
        self._world = world_of(devices, mesh, timeout)
        self.devices = self._world.devices
        self._team = self._make_team(intra_op_threads)
        self._close = close_with(self, self._team, self._world)
        check_options(schedule, loss, loss_weight)
        model, compiler = uncompiled(model)
        check_compiled(model, traced=layers is None and not is_sequence(model))
        if isinstance(schedule, Plan):
            check_plan(schedule, self._world, microbatches, partition, remat, costs, stages_per_device)
            check_cuts(schedule, model, traced=layers is None and not is_sequence(model))
            microbatches, partition, remat = schedule.microbatches, schedule.partition, schedule.remat
            costs, stages_per_device = schedule.costs, schedule.stages_per_device
        count = len(self.devices)
        stages_per_device = stages_per_device_of(schedule, stages_per_device, partition, count)
        self._costs = costs
        self._cuts = schedule.cuts if isinstance(schedule, Plan) else None
        self._schedules = Schedules(schedule, count, stages_per_device, costs, memory_limit, objective, remat)
        self.microbatches = at_least_one("microbatches", microbatches)
        self._loss, self._loss_weight = own_loss if loss is None else loss, loss_weight
        self._tied: Tied = one_of("tied", self._world.tied if tied is None else tied, ("exact", "summed"))
        self._batch_dims, self._target_dims = batch_dims, target_dims
        self._timeline = timeline
        self.seed = seed
        self.steps = 0  # done so far; random numbers depend on it

        self._batchnorm: BatchNorm = batchnorm
        self._compiler, self._init = compiler_of(compile) or compiler, init
        self.schedule = self._schedules.made(self.microbatches)
        self._programs: dict[tuple[int, bool, bool], Program] = {}
        self._stages: list[Stage] = []  # those of this process
        self._uses: Uses = {}  # which stages use a parameter
        self._called: Makeup | None = None  # what the stages were made of; None: of what was tried in vain
        self._edition: Any = None  # of a traced model, for which the stages were made
        self._nothing = nn.Parameter(torch.empty(0))
        self._ties: list[Tie] = []
        self.partition: tuple[int, ...] = ()
        self._model: Layers | Captured
        if layers is not None or is_sequence(model):
            self._model = Layers(model, layers)
            with room_for(self.schedule, count, "cut the model into smaller layers"):
                self.partition = layers_per_stage(self._model, self.schedule.num_stages, partition)
            self._world.agree(self._facts())
            self._world.compare_weights(self._model.module)
            self._make_stages()
        else:
            assert isinstance(model, nn.Module)
            check_data(model, "a model that is traced needs data first, or its layers= with init=")
            if self._cuts is None:
                check_uncounted(partition, model)
            self._model = Captured(model, self._stage_devices, self._cuts, movable=self._is_whole)
            self._world.agree(self._facts())
            self._world.compare_weights(self._model.module)
            if example is not None:
                self._prepared([_apart(mb.split(example, self.microbatches, batch_dims)[0])])
        self._called_as_a_whole = None if layers is not None else model

    # -- training ---------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any,
        target: Any = None,
        *,
        weight: float | Fraction = 1.0,
        sync: bool = True,
        outputs: bool = False,
        scaler: Any = None,
    ) -> Result:
        """Forward and backward of a minibatch; gradients are added to `.grad`, the optimizer is yours.

        `inputs` is a tensor, a tuple (positional arguments of the first layer) or a dict (its keyword arguments).
        `weight` is for a minibatch that takes several steps: this one's share of it, by which all losses are
        multiplied. Replicas (`dp`) exchange their gradients at the last of them; `sync=False` marks those before it.
        `outputs` asks for the model's outputs, `scaler` is a torch.amp.GradScaler that scales the losses.
        """
        part = Share.of(weight, sync)
        if scaler is not None:
            self._world.check_scaler()
        if not torch.is_grad_enabled():
            raise ConfigError(
                "step computes gradients, but they are switched off here: call it outside no_grad, or use evaluate"
            )
        check_no_hooks_for_all(self._called_as_a_whole)
        parts, targets, counts = self._split(inputs, target)
        parts = [_apart(part) for part in parts]
        with self._team.held(), self._world.call("in a step"):
            self._world.check_start()
            self._follow()
            prepared = self._prepared(parts)
            program = self._program(len(parts), inference=False, recorded=self._timeline)
            counted = self._weighed(inputs, target, parts, prepared, targets, counts)
            self._world.check_batch(inputs, target, counted.numbers, self.schedule, inference=False)
            weights = self._world.weights(counted, self.microbatches, part)
            batch = program.batch
            batch.step, batch.inputs, batch.targets, batch.want_outputs = self.steps, prepared, targets, outputs
            batch.weights = weights if scaler is None else _scaled(weights, scaler, self._last_device)
            try:
                self._world.begin()
                for shared in self._ties:
                    shared.begin()
                self._run(program)
                self._world.end(self._ties)
                for stage in self._stages:
                    stage.finish()
                losses, weights = self._world.losses(program.schedule, batch.losses, weights)
                merged = mb.merge(batch.outputs, counts) if outputs and self._has_last else None
                timeline = self._world.measured(program) if self._timeline else None
            except BaseException:
                self._world.give_up()
                raise
            finally:
                program.clear()
            self.steps += 1
        return Result(losses, tuple(weights), merged, timeline)

    def evaluate(self, inputs: Any, target: Any = None, *, outputs: bool = True) -> Result:
        """Outputs, and the loss if there is a target, in eval mode and without gradients."""
        check_no_hooks_for_all(self._called_as_a_whole)
        parts, targets, counts = self._split(inputs, target)
        with self._team.held(), self._world.call("evaluating"):
            self._world.check_start()
            self._world.check_batch(inputs, target, (), self.schedule, inference=True)
            self._follow()
            modes = [(module, module.training) for module in self._model.module.modules()]
            self._model.module.eval()
            try:
                with torch.no_grad():
                    prepared = self._prepared(parts)
                program = self._program(len(parts), inference=True, recorded=False)
                batch = program.batch
                batch.inputs, batch.targets = prepared, targets if target is not None else ()
                try:
                    self._run(program)
                    losses = tuple(batch.losses) if target is not None else ()
                    if self._loss is own_loss and self._has_last:
                        losses = tuple(loss for out in batch.outputs if (loss := find_loss(out)) is not None)
                    counted = Weighed([float(count) for count in counts])
                    if target is not None or self._loss is own_loss:
                        counted = self._weighed(inputs, target, parts, prepared, targets, counts)
                    weights = self._world.weights(counted, self.microbatches, Share())
                    losses, weights = self._world.losses(program.schedule, losses, weights)
                    merged = mb.merge(batch.outputs, counts) if outputs and self._has_last else None
                finally:
                    program.clear()
                    self._world.release()
            finally:
                for module, training in modes:
                    module.training = training
        return Result(losses, weights if losses else (), merged)

    def __call__(self, inputs: Any, target: Any = None, *, outputs: bool = True) -> Result:
        """As `evaluate`: `pipe(x).outputs` are the model's. To train, call `step`."""
        return self.evaluate(inputs, target, outputs=outputs)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_: the total norm before clipping, in the model's order of parameters."""
        return self._world.clip(list(self._model.module.parameters()), max_norm, norm_type)

    # -- the model --------------------------------------------------------------------------------------------------

    def module(self) -> nn.Module:
        """The plain model, with the trained weights."""
        self._follow_between_steps()
        return self._model.module

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this process; under a mesh an empty one on a rank that has none, since optimizers want some."""
        mine = [parameter for _, parameter in self.named_parameters()]
        yield from mine or ([self._nothing] if self._world.here != range(len(self.devices)) else [])

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this process, under the model's names."""
        self._follow_between_steps()
        return ((name, each) for name, each in self._model.module.named_parameters() if self._holds(each))

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """The model's own: it knows nothing of stages. Under a mesh every rank gets all of it, on the CPU, or without
        `whole` what is held there.
        """
        self._follow_between_steps()
        return self._world.state(self._model.module, whole)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Under a mesh every rank takes what it needs, from a whole state or its own."""
        self._follow_between_steps()
        return self._world.load(self._model.module, state, strict)

    def train(self, mode: bool = True) -> "Pipeline":
        self._follow_between_steps()
        self._model.module.train(mode)
        return self

    def eval(self) -> "Pipeline":
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the model; gradients of steps with `sync=False` are dropped too."""
        self._follow_between_steps()
        self._world.zero_grad(self._model.module, set_to_none)

    @property
    def compile_seconds(self) -> float:
        """How long the calls lasted in which compiled layers were compiled: the cold start."""
        return sum(stage.compile_seconds for stage in self._stages)

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def stopping(self) -> bool:
        """Under a mesh, SIGTERM has come to some rank: the next step would end the process, on every rank."""
        return self._world.stopping

    def close(self) -> None:
        """End the threads. The model and its gradients stay."""
        self._close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Pipeline has threads, so it can't be copied or pickled: do that with its model or state_dict()"
        )

    def __repr__(self) -> str:
        timeline = simulate(self.schedule, self._costs)
        name, bubble = self.schedule.name or "schedule", 100 * float(timeline.bubble)
        sizes = f"{len(self.devices)} devices, {self.schedule.num_stages} stages, {self.microbatches} microbatches"
        lines = [f"Pipeline: {name}, {sizes}, predicted bubble {bubble:.1f}%"]
        first = 0
        stages = dict(zip(self._stages_here, self._stages, strict=bool(self._stages)))
        for stage, count in enumerate(self.partition):
            device = self.schedule.placement.device(stage, 0)
            size = sum(self._model.costs()[first : first + count]) - count
            remat = ""
            if (work := stages.get(stage)) is not None:
                remat = f", remat {work.remat}" if work.remat != "none" else ""
                remat += f", {work.num_compiled} compiled in {work.compile_seconds:.1f} s" if work.num_compiled else ""
            lines.append(
                f"  stage {stage} on device {device} ({self.devices[device]}): {self._names(stage, first, count)}, "
                f"{size:,} parameters{remat}"
            )
            first += count
        return "\n".join(lines if self._stages else [*lines, "  to be traced and cut when the first batch comes"])

    def _names(self, stage: int, first: int, count: int) -> str:
        """What a stage has, in the user's words."""
        if isinstance(self._model, Captured):
            names = self._model.edition.names
            return names[stage] if names else "to be traced again, since the model was edited"
        return f"layers {first} to {first + count - 1}"

    # -- how it is done ---------------------------------------------------------------------------------------------

    def _make_team(self, threads: int | None) -> Team:
        if threads is None:
            threads = max(1, torch.get_num_threads() // len(self._world.here))
        names = [f"gapless device {device}" for device in self._world.here]
        return Team(names, at_least_one("intra_op_threads", threads))

    def _facts(self) -> dict[str, Any]:
        """What all ranks must have been asked for alike."""
        return {
            "microbatches": self.microbatches,
            "schedule": self.schedule.name or "one without a name",
            "stages": self.schedule.num_stages,
            "partition": list(self.partition),
            "cuts": None if self._cuts is None else list(self._cuts.after),
            "seed": self.seed,
            "remat": self._schedules.remat_of(self.schedule.num_stages),
            "loss": named(self._loss),
            "loss_weight": named(self._loss_weight),
            "batchnorm": self._batchnorm,
            "tied": self._tied,
            "costs": repr(self._costs),
            "memory_limit": repr(self._schedules.memory_limit),
            "objective": self._schedules.objective,
            "compile": repr(self._compiler),
            "timeline": self._timeline,
            "batch_dims": repr(self._batch_dims),
            "target_dims": repr(self._target_dims),
            "row of device": {str(k): line for k, line in enumerate(self.schedule.csv().splitlines())},
            "model": described(self._model.module),
        }

    def _split(self, inputs: Any, target: Any) -> tuple[list[Any], list[Any], list[int]]:
        """Inputs and targets of the microbatches, and their sizes; a rank that has no use for some has None there."""
        size = mb.batch_size(inputs, self._batch_dims)
        here = self._has_first or size == 0 or isinstance(self._model, Captured) or target is None
        count = min(size, self.microbatches)
        parts = mb.split(inputs, self.microbatches, self._batch_dims) if here else [None] * count
        targets = [None] * count
        if target is not None:
            targets = mb.split(target, count, self._target_dims, size=size)
        return parts, targets, mb.sizes(size, count)

    def _prepared(self, parts: list[Any]) -> list[Any]:
        """Microbatches as the first stage takes them. A module is traced and cut here, when a new kind comes."""
        model = self._model
        if isinstance(model, Layers):
            return parts
        known, edition = model.num_traces, model.edition
        with room_for(self.schedule, len(self.devices), "give smaller layers with layers="):
            prepared: list[Any] = model.prepare(parts)
        if model.num_traces != known or edition is not self._edition:
            model.settle()
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

    @property
    def _stage_devices(self) -> list[torch.device]:
        placement = self.schedule.placement
        return [self.devices[placement.device(stage, 0)] for stage in range(self.schedule.num_stages)]

    @cached_property
    def _stages_here(self) -> list[int]:
        placement = self.schedule.placement
        return [stage for stage in range(self.schedule.num_stages) if placement.device(stage, 0) in self._world.here]

    @property
    def _has_first(self) -> bool:
        """Whether inputs are used in this process."""
        return 0 in self._stages_here

    @property
    def _has_last(self) -> bool:
        """Whether outputs and losses are made in this process."""
        return self.schedule.num_stages - 1 in self._stages_here

    @property
    def _last_device(self) -> torch.device:
        return self.devices[self.schedule.placement.device(self.schedule.num_stages - 1, 0)]

    def _run(self, program: Program) -> None:
        count = program.schedule.num_microbatches
        program.batch.outputs, program.batch.losses = [None] * count, [None] * count
        with self._world.running(program, self._costs):
            execute(program, self._team)

    def _program(self, microbatches: int, *, inference: bool, recorded: bool) -> Program:
        key = (microbatches, inference, recorded)
        if key not in self._programs:
            schedule = self.schedule if microbatches == self.microbatches else self._schedules.made(microbatches)
            if inference:
                schedule = lower.forward_only(schedule)
            self._programs[key] = Program(
                schedule,
                dict(zip(self._stages_here, self._stages, strict=True)),
                self._world.lanes,
                self._loss,
                self._world.channels(schedule),
                here=self._world.here,
                recorded=recorded,
                after=self._world.after(schedule),
            )
        return self._programs[key]

    def _make_stages(self) -> None:
        parts = self._parts()
        if self._uses and not self._is_whole:
            devices = [self.schedule.placement.device(stage, 0) for stage in range(self.schedule.num_stages)]
            names = {each: name for name, each in self._model.module.named_parameters()}
            check_stay(self._uses, uses_of(parts), devices, names)
        self._called = None
        self._programs.clear()
        self._stages = make_stages(
            self._model,
            self.partition,
            self.schedule,
            self._stages_here,
            self._stage_devices,
            remat=self._schedules.remat_of(self.schedule.num_stages),
            loss=self._loss,
            init=self._init,
            compiler=self._compiler,
            seed=self.seed,
            batchnorm=self._batchnorm,
            first_microbatch=self._world.first_microbatch(self.microbatches),
        )
        self._adopt(parts)
        warn_of_unsplit(self._stages)
        self._called = Makeup(partial(_called_now, self._model, self._loss))

    def _adopt(self, parts: list[list[Any]]) -> None:
        """Parameters that several stages share are tied."""
        for shared in self._ties:
            shared.release()
        stages = dict(zip(self._stages_here, self._stages, strict=True))
        self._ties = self._world.adopt(self._model.module, stages, parts, self.schedule, self._tied)
        self._uses = uses_of(parts)

    def _parts(self) -> list[list[Any]]:
        """What each stage calls, wherever it is."""
        parts = layers_of(self._model, self.partition)
        return [*parts[:-1], [*parts[-1], self._loss]]

    # -- a model that is edited between steps -------------------------------------------------------------------------

    def _follow(self) -> None:
        """Takes over what was edited in the model since the last step."""
        if isinstance(self._model, Captured):
            self._model.notice()
        if not self._stages or (self._called is not None and self._called.same()):
            return
        before, partition = self._model, self.partition
        try:
            if isinstance(before, Layers):
                self._take_over(before, before.again())
            self._make_stages()
        except BaseException:
            self._model, self.partition, self._called = before, partition, None
            raise

    def _follow_between_steps(self) -> None:
        """The same for whoever asks for the parameters; inside a step nothing may change."""
        if not self._team.busy:
            self._follow()

    def _holds(self, parameter: nn.Parameter) -> bool:
        """Whether it is of this process. Of a new one in a traced model that is known when it is traced."""
        new = isinstance(self._model, Captured) and self._model.edition is not self._edition
        return (new and parameter not in self._uses) or self._world.holds(parameter)

    def _take_over(self, before: Layers, now: Layers) -> None:
        check_compiled(now.module, traced=False)
        partition = followed(before.layers, self.partition, now.layers)
        if partition is None and not self._is_whole:
            raise PartitionError(
                f"after an edit, the model has {len(now.layers)} layers in another order, so some would change "
                "their rank: edit the model before you make the pipeline"
            )
        self._model = now
        self.partition = partition or layers_per_stage(now, self.schedule.num_stages, None)
        if uses_of(self._parts()) != self._uses:
            self._world.agree(self._facts())

    @property
    def _is_whole(self) -> bool:
        """Whether all devices are in this process."""
        return len(self._world.here) == len(self.devices)

    def _weighed(
        self,
        inputs: Any,
        target: Any,
        parts: Sequence[Any],
        prepared: Sequence[Any],
        targets: Sequence[Any],
        counts: Sequence[int],
    ) -> Weighed:
        """What each microbatch counts."""
        if isinstance(self._model, Captured) and self._loss is own_loss:
            return self._model.weighed(prepared, inputs, counts, self._loss_weight, parts)
        if target is None:
            targets, target = parts, inputs
        return weighed(self._loss, self._loss_weight, counts, targets, target)


def _called_now(model: Layers | Captured, loss: Any) -> list[Any]:
    """What stages call as it is: layers, and the loss. A pipeline that held a method of its own for it would stay when
    nobody else holds it.
    """
    return [*model.called(), loss]


def _scaled(weights: Sequence[float], scaler: Any, device: torch.device) -> list[Tensor | float]:
    """The weights times the scale of a GradScaler, which is a power of two: the losses' other bits stay."""
    return [scaler.scale(torch.tensor(weight, device=device)) if weight else 0.0 for weight in weights]


def _apart(part: Any) -> Any:
    """Microbatches are views of one tensor and share its version counter: a layer that changes its input in place
    would make torch believe that those of all other microbatches have changed.
    """
    if part is None:
        return None
    tensors, shape = mb.flatten(part)
    return mb.unflatten([tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors], shape)
