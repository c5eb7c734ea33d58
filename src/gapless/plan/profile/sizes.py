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
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from gapless.plan.profile.meter import GpuMeter, Meter, bytes_of, meter_for
from gapless.plan.profile.profile import Sizes
from gapless.plan.profile.task import Task, copied, ones_like_outputs, remade
from gapless.stage.batch import microbatch as mb
from gapless.stage.stage import Stage


def measured_sizes(task: Task) -> tuple[list[Sizes], int]:
    """Of each layer, run on copies of the layers, and the bytes of what the first one takes."""
    return _sizes(task, lambda layer: copied(layer, task.device), fake=False)


def fake_sizes(task: Task) -> tuple[list[Sizes], int]:
    """The same by tensors that have a shape, a type and a device but no data: for models that do not fit."""
    mode, device = FakeTensorMode(allow_non_fake_inputs=True), task.device

    def fake(layer: Any) -> Any:
        return _faked(layer, mode, device) if isinstance(layer, nn.Module) else layer

    inputs, target = (
        remade(tree, lambda each: _fake_tensor(each, mode, device)) for tree in (task.inputs, task.target)
    )
    with mode:
        return _sizes(replace(task, inputs=inputs, target=target), fake, fake=True)


def _sizes(task: Task, make: Callable[[Any], Any], *, fake: bool) -> tuple[list[Sizes], int]:
    inputs, target, optimizer = task.inputs, task.target, task.optimizer
    found: list[dict[str, int]] = []
    before: tuple[Any, Any] | None = None  # the layer before, and its inputs
    for number, layer in enumerate(task.layers):
        here = make(layer)
        meter = meter_for(task.device, fake=fake)
        stage = task.stage([here], number, split=True)
        size, outputs = _of_stage(stage, meter, inputs, target)
        if fake:  # such tensors are not deferred, so what W needs was not seen
            size["kept_for_weight_grad"], size["kept_input"] = size["activation"], size["input"]
        parameters = list(here.parameters()) if isinstance(here, nn.Module) else []
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        size["parameters"] = bytes_of(parameters) + (bytes_of(here.buffers()) if isinstance(here, nn.Module) else 0)
        size["gradients"] = sum(parameter.nbytes for parameter in trained)
        if optimizer is not None and trained:
            size["optimizer_state"], size["update_workspace"] = _of_optimizer(optimizer(trained), trained, meter)
        if before is not None:
            pair, _ = _of_stage(task.stage([before[0], here], number - 1, split=True), meter, before[1], target)
            size["overlap"] = max(0, found[-1]["activation"] + size["activation"] - pair["activation"])
        found.append(size)
        before, inputs = (here, inputs), outputs
    taken = [size.pop("input") for size in found]
    return [Sizes(**size) for size in found], taken[0]


def _of_stage(stage: Stage, meter: Meter, inputs: Any, target: Any) -> tuple[dict[str, int], Any]:
    """Its `Sizes`, the bytes of its `input`, and what it returns for these inputs. The first runs only tell the stage
    what it has to know.
    """
    more = {} if stage.loss is None else {"target": target}
    meter.clear_libraries()
    for halves in (True, False, True):
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
        for halves in (False, True):
            start = meter.live()
            given = _renewed(inputs)
            size["input"] = meter.live() - start
            meter.peak()
            made = stage.forward(0, given, step=0, defer=halves, want_outputs=stage.loss is None, **more)
            came_in = {StorageWeakRef(each.untyped_storage()): each.nbytes for each in mb.flatten(given)[0]}
            del given
            forward, with_output = meter.peak(), meter.live()
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
                size["workspace"] = taken
    stage.finish()
    size["libraries"] = meter.clear_libraries()
    return size, outputs


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
