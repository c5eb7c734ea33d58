"""What the layers hold: measured while each runs as a stage of its own, or found without running anything.

    held
      |        ______ F's own workspace      ______ that of I, with the gradient it begins with
      |   ____/      \\____ activation _____/      \\                 ___ that of W
      |  /                                         \\___ kept for W _/   \\___
      +---------------------------------------------------------------------- time

Two neighbours in one stage hold less than both alone: what one hands the other is there once, or not at all. What the
libraries of a GPU take at their first product they keep, for each of its streams and for each thread that works there.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from gapless.plan.profile.meter import FlopCount, GpuMeter, Meter, bytes_of, meter_for
from gapless.plan.profile.profile import Sizes
from gapless.plan.profile.runner import Times
from gapless.plan.profile.task import Task, copied, ones_like_outputs, remade
from gapless.stage.batch import microbatch as mb
from gapless.stage.stage import Stage


class Sized(NamedTuple):
    """Of each layer its sizes, and the FLOPs of its F and of its B; `input`: bytes of what the first one takes."""

    sizes: list[Sizes]
    work: list[tuple[FlopCount, FlopCount]]
    input: int

    def times(self, speed: float) -> Times:
        """FLOPs at this speed. A product with a weight that learns has one for its gradient, one for the input's."""
        times = Times()
        for number, (size, (forward, backward)) in enumerate(zip(self.sizes, self.work, strict=True)):
            more = backward.flops - forward.flops if backward.flops > forward.flops else backward.flops
            weights = min(forward.weight_flops, more) if size.gradients else 0
            taken = {"B": backward.flops, "I": backward.flops - weights, "W": weights}
            for letter, flops in (taken | dict.fromkeys("FfR", forward.flops)).items():
                times.add(number, letter, flops / speed)
        return times


def measured_sizes(task: Task) -> Sized:
    """Run on copies of the layers. On a GPU nobody counts FLOPs."""
    return _sizes(task, lambda layer: copied(layer, task.device), fake=False)


def fake_sizes(task: Task) -> Sized:
    """The same by tensors that have a shape, a type and a device but no data: for models that do not fit."""
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), task.device

    def fake(layer: Any) -> Any:
        return _faked(layer, mode, device) if isinstance(layer, nn.Module) else layer

    inputs, target = (
        remade(tree, lambda each: _fake_tensor(each, mode, device)) for tree in (task.inputs, task.target)
    )
    with mode:
        return _sizes(replace(task, inputs=inputs, target=target), fake, fake=True)


def _sizes(task: Task, make: Callable[[Any], Any], *, fake: bool) -> Sized:
    inputs, target, optimizer = task.inputs, task.target, task.optimizer
    found: list[dict[str, int]] = []
    works: list[tuple[FlopCount, FlopCount]] = []
    before: tuple[Any, Any] | None = None  # the layer before, and its inputs
    for number, layer in enumerate(task.layers):
        here = make(layer)
        meter = meter_for(task.device, fake=fake)
        stage = task.stage([here], number, split=True)
        size, work, outputs = _of_stage(stage, meter, inputs, target, fake=fake)
        works.append(work)
        if fake:
            size["kept_for_weight_grad"], size["kept_input"] = size["activation"], size["input"]
            size["halves_workspace"] = size["weight_workspace"] = size["workspace"]
        parameters = list(here.parameters()) if isinstance(here, nn.Module) else []
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        size["parameters"] = bytes_of(parameters) + (bytes_of(here.buffers()) if isinstance(here, nn.Module) else 0)
        size["gradients"] = sum(parameter.nbytes for parameter in trained)
        if optimizer is not None and trained:
            size["optimizer_state"], size["update_workspace"] = _of_optimizer(optimizer(trained), trained, meter)
        if before is not None:
            pair, *_ = _of_stage(
                task.stage([before[0], here], number - 1, split=True), meter, before[1], target, fake=fake
            )
            size["overlap"] = max(0, found[-1]["activation"] + size["activation"] - pair["activation"])
        found.append(size)
        before, inputs = (here, inputs), outputs
    taken = [size.pop("input") for size in found]
    return Sized([Sizes(**size) for size in found], works, taken[0])


def _of_stage(
    stage: Stage, meter: Meter, inputs: Any, target: Any, *, fake: bool
) -> tuple[dict[str, int], tuple[FlopCount, FlopCount], Any]:
    """Its `Sizes` with the bytes of its `input`, its FLOPs, and what it returns for these inputs. The first runs only
    tell the stage what it has to know. Fake tensors are not deferred, so that halves would show nothing more.
    """
    more = {} if stage.loss is None else {"target": target}
    meter.clear_libraries()
    for halves in (False,) if fake else (True, False, True):
        given = _renewed(inputs)
        outputs = stage.forward(0, given, step=0, defer=halves, **more)
        grads = ones_like_outputs(outputs) if stage.loss is None else None
        if halves:
            stage.backward_input(0, grads)
            stage.backward_weight(0)
        else:
            stage.backward(0, grads)
    del grads
    if stage.loss is not None:
        outputs = outputs[0]
    size: dict[str, int] = defaultdict(int)
    size |= {"boundary": sum(each.nbytes for each in mb.flatten(outputs)[0]), "passed": _passed(given, outputs)}
    del given
    with meter.on():
        for halves in (False,) if fake else (False, True):
            start = meter.live()
            given = _renewed(inputs)
            size["input"] = meter.live() - start
            meter.peak()
            meter.counted()
            made = stage.forward(0, given, step=0, defer=halves, want_outputs=stage.loss is None, **more)
            came_in = {StorageWeakRef(each.untyped_storage()): each.nbytes for each in mb.flatten(given)[0]}
            del given
            forward, with_output, ahead = meter.peak(), meter.live(), meter.counted()
            del made
            held = meter.live()
            size["held_output"] = max(0, size["boundary"] - (with_output - held)) if stage.loss is None else 0
            size["activation"] = max(size["activation"], held - start)
            # As in a pipeline: whoever calls holds the gradients to begin with until the end.
            grads = ones_like_outputs(outputs) if stage.loss is None else None
            back = stage.backward_input(0, grads) if halves else stage.backward(0, grads)
            size["forward_workspace"] = max(size["forward_workspace"], forward - held)
            taken = meter.peak() - held
            del back, grads
            if halves:
                held = meter.live()
                size["kept_for_weight_grad"] = held - start
                size["kept_input"] = sum(each for storage, each in came_in.items() if not storage.expired())
                meter.peak()
                stage.backward_weight(0)
                size["halves_workspace"], size["weight_workspace"] = taken, meter.peak() - held
            else:
                size["workspace"], work = taken, (ahead, meter.counted())
    stage.finish()
    size["libraries"] = meter.clear_libraries()
    return size, work, outputs


def _passed(given: Any, outputs: Any) -> int:
    """Bytes of what is returned just as it was given, and has a gradient."""
    there = {tensor.untyped_storage()._cdata for tensor in mb.flatten(given)[0]}
    same = [tensor for tensor in mb.flatten(outputs)[0] if tensor.untyped_storage()._cdata in there]
    return sum(tensor.nbytes for tensor in same if tensor.requires_grad)


def _renewed(tree: Any) -> Any:
    """Copies, which nobody else holds."""
    return remade(tree, torch.clone)


def _of_optimizer(optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter], meter: Meter) -> tuple[int, int]:
    """Bytes of what an optimizer keeps after a step, and what it takes on top during the next one."""
    with torch.no_grad():
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        taken = 0
        if isinstance(meter, GpuMeter):  # elsewhere one parameter is updated after another
            held = meter.live()
            meter.peak()
            optimizer.step()
            taken = meter.peak() - held
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return bytes_of(kept), taken


def _faked(layer: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """The same module with fake tensors: nothing is copied that has data."""
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        tensor = _fake_tensor(parameter.detach(), mode, device)
        memo[id(parameter)] = nn.Parameter(tensor, parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = _fake_tensor(buffer, mode, device)
    return copy.deepcopy(layer, memo)


def _fake_tensor(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    with mode:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)
