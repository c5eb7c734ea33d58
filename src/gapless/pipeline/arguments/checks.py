"""What a user asks of a pipeline, checked: a fact, its numbers and the way out where it can't be done."""

import inspect
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, PartitionError, ScheduleError, TooFewLayersError
from gapless.model.layers import Layers, cost_of, more_than_its_layers
from gapless.model.materialise import on_meta
from gapless.plan.asynchronous.replicate import Replication
from gapless.plan.cut.partition import balanced, check_enough_layers
from gapless.plan.plan import Plan
from gapless.run.one_process import OneProcess
from gapless.run.world import Carriage, TransportName, World
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.verify import verify
from gapless.stage.compiled import is_compiled
from gapless.stage.devices import Devices, torch_devices
from gapless.stage.graphs.graphed import Graphs
from gapless.units import show_count


def named(value: Any) -> str:
    """A function, by its name; anything else as it is."""
    if callable(value):
        kind = value if hasattr(value, "__qualname__") else type(value)
        return f"{kind.__module__}.{kind.__qualname__}"
    return repr(value)


def check_options(schedule: Any, loss: Any, loss_weight: Any) -> None:
    """They are of the kinds that are understood."""
    if not isinstance(schedule, str | Schedule | Plan | Replication | None):
        raise ConfigError(
            f"schedule is a {type(schedule).__name__}, but it must be a name, a Schedule, a Plan or a Replication"
        )
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r:.40}, but it must be a function of the outputs and the target")
    if loss is not None and not _takes_two(loss):
        raise ConfigError(
            f"loss is {named(loss)}{inspect.signature(loss)}, but it is called with the outputs and the target: give "
            "it two parameters; it may ignore one"
        )
    if not (loss_weight is None or loss_weight == "sum" or callable(loss_weight)):
        raise ConfigError(f"loss_weight is {loss_weight!r:.40}, but it must be None, 'sum' or a function of a target")


def _takes_two(loss: Any) -> bool:
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # nobody knows what it takes
        return True
    return True


@contextmanager
def closed_if_refused(close: Callable[[], object]) -> Iterator[None]:
    """What was opened before the arguments were checked does not stay open."""
    try:
        yield
    except BaseException:
        close()
        raise


@contextmanager
def room_for(schedule: Schedule, num_devices: int, by_hand: str) -> Iterator[None]:
    """Where a model has too few layers for the stages of a schedule, one that fits is named; `by_hand` is how to get
    more layers.
    """
    try:
        yield
    except TooFewLayersError as error:
        each = schedule.num_stages // num_devices
        needs = f"{schedule.name or 'the schedule'} on {_devices(num_devices)} needs {schedule.num_stages} stages"
        if num_devices <= error.most and each > 1:
            other = "zb-h1" if Kind.WEIGHT_GRAD in schedule.kinds else "1f1b"
            fewer = f", at most {_devices(error.most // each)}" if error.most >= each else ""
            way_out = f"use schedule={other!r}, which has {num_devices}{fewer}, or {by_hand}"
        elif error.most > 1:
            way_out = f"use at most {error.most} devices{' with 1f1b' if each > 1 else ''}, or {by_hand}"
        else:
            way_out = f"{by_hand}, of which each stage needs one"
        raise PartitionError(f"{str(error).partition(', but')[0]}, but {needs}: {way_out}") from None


def _devices(count: int) -> str:
    return show_count(count, "device")


def check_data(layer: nn.Module, way_out: str = "give init=, a function or a checkpoint that fills it") -> None:
    """Nothing of it is on the meta device."""
    empty = on_meta([layer])
    if empty:
        raise ConfigError(f"{empty[0]} of a {type(layer).__name__} is on the meta device, without data: {way_out}")


def check_compiled(model: Any, *, traced: bool) -> None:
    """Nothing was compiled that is lost when the model is cut."""
    if not isinstance(model, nn.Module):
        return
    way_out = f"compile=True, or options of torch.compile, which compile every {'stage' if traced else 'layer'}"
    if model._compiled_call_impl is not None:
        raise ConfigError(
            f"this {type(model).__name__} was compiled as a whole, but a pipeline cuts it: leave out its "
            f"compile() and give {way_out}"
        )
    parts = [name for name, part in model.named_modules() if traced and name and is_compiled(part)]
    if parts:
        raise ConfigError(
            f"{parts[-1]} of this {type(model).__name__} is compiled, but a traced model is not: leave it uncompiled "
            f"and give {way_out}, or give the layers with layers="
        )


def check_uncounted(partition: Sequence[int] | None, model: Any) -> None:
    """A model that is traced has no layers to count."""
    if partition is not None:
        more = more_than_its_layers(model)
        subject = "a module" if more is None else f"this {type(model).__name__}, which has {more},"
        raise PartitionError(
            f"partition counts the layers of a sequence, but {subject} is traced and cut by cost: leave it out, or "
            "give the layers with layers="
        )


def one_of(word: str, value: Any, known: Sequence[str]) -> Any:
    """The value, which must be one of those known."""
    if value not in known:
        raise ConfigError(f"{word} is {value!r}, but it must be {' or '.join(repr(name) for name in known)}")
    return value


def check_system() -> None:
    """Ranks use memory, pipes and signals as Linux has them."""
    if sys.platform != "linux":
        raise ConfigError(
            f"a process for each device (mesh=, torchrun) needs Linux, and this is {platform.system() or 'another'}: "
            "use devices= in one process, or run it on Linux"
        )


def check_where(devices: Any, mesh: Any) -> None:
    """One of the two is given, and not both."""
    if (devices is None) == (mesh is None):
        given = "give one of them, as devices=2" if mesh is None else "both are given, leave one out"
        raise ConfigError(f"devices= is for one process and mesh= for one process per device: {given}")
    if mesh is not None:
        check_system()


def _of_plan(schedule: object, devices: Devices | World | None) -> Devices | World | None:
    """Of the devices that a plan was made for, those that it uses, in its order."""
    if not isinstance(schedule, Plan) or schedule.searched is None or schedule.mesh.replicas > 1:
        return devices
    if not isinstance(devices, int | str | torch.device | Sequence):
        return devices
    there, used = torch_devices(devices), schedule.mesh.order or range(schedule.num_devices)
    return [there[number] for number in used] if len(there) == schedule.searched.devices else devices


def world_of(
    devices: Devices | World | None,
    mesh: Any,
    timeout: float,
    intra_op_threads: int | None,
    carriage: Carriage,
    schedule: object = None,
) -> World:
    """One process with a thread per device, or one of many processes; or one that the caller has made. A plan, given as
    the schedule, chooses among the devices that it was made for.
    """
    check_where(devices, mesh)
    devices = _of_plan(schedule, devices)
    transport, static_shapes = carriage
    one_of("transport", transport, get_args(TransportName))
    if mesh is None and transport != "auto":
        raise ConfigError(f"transport={transport!r} is for mesh=: in one process there are no messages; leave it out")
    if static_shapes is not False and static_shapes is not True and static_shapes != "auto":
        raise ConfigError(f"static_shapes is {static_shapes!r}, but it must be True, False or 'auto'")
    if mesh is None and static_shapes is True:
        raise ConfigError("static_shapes=True is for mesh=: in one process no message is waited for; leave it out")
    if intra_op_threads is not None:
        at_least_one("intra_op_threads", intra_op_threads)
    if devices is None:
        from gapless.run.ranks.many_processes import ManyProcesses
        from gapless.run.ranks.mesh_position import mesh_position  # here alone: torch.distributed need not be there

        return ManyProcesses(mesh_position(mesh), timeout, intra_op_threads, carriage)
    if isinstance(devices, int | str | torch.device | Sequence):
        found = torch_devices(devices)
        _warn_of_copies(found[0].type)
        return OneProcess(found, intra_op_threads)
    return devices


def _warn_of_copies(kind: str) -> None:
    """Where torchrun has started others that do the same."""
    count = os.environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in os.environ and count.isdecimal() and int(count) > 1:
        warnings.warn(
            f"torchrun started {count} processes, and devices= makes a separate pipeline in each: for one over "
            f"all of them, give mesh=init_device_mesh('{kind}', ({count},), mesh_dim_names=('pp',)) instead",
            stacklevel=2,
        )


def graphs_of(graphs: Graphs, devices: Sequence[torch.device]) -> Graphs:
    """As asked, where there is a GPU."""
    if not isinstance(graphs, bool) and graphs != "auto":  # 1 is no True here
        raise ConfigError(f"graphs is {graphs!r}, but it must be False, True or 'auto'")
    if graphs is True and all(device.type != "cuda" for device in devices):
        raise ConfigError("graphs=True is for GPUs, and every device is a CPU: leave it out, or give graphs='auto'")
    return graphs


def at_least_one(word: str, value: int | None) -> int:
    """The value, which must be a whole number above 0."""
    if value is None:
        raise ConfigError(f"{word}= is missing: give a whole number of at least 1")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{word} is {value!r}, but it must be a whole number of at least 1")
    return value


def fitting_schedule(schedule: Schedule, num_devices: int, microbatches: int) -> Schedule:
    """A schedule of the user's, which must be for these sizes, and right."""
    if schedule.num_devices != num_devices or schedule.num_microbatches != microbatches:
        raise ScheduleError(
            f"the schedule is for {schedule.num_devices} devices and {schedule.num_microbatches} microbatches, but "
            f"this step has {num_devices} devices and {microbatches} microbatches: pass its name, which fits any sizes"
        )
    verify(schedule).raise_if_wrong()
    return schedule


def layers_per_stage(model: Layers, num_stages: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    """As asked for, or balanced by parameters."""
    if asked is None:
        return balanced([cost_of(layer) for layer in model.layers], num_stages)
    counts = tuple(asked)
    check_enough_layers(len(model.layers), num_stages)
    if len(counts) != num_stages or sum(counts) != len(model.layers) or min(counts) < 1:
        raise PartitionError(
            f"partition {list(counts)} has {show_count(len(counts), 'stage')} and {show_count(sum(counts), 'layer')}, "
            f"but the schedule has {show_count(num_stages, 'stage')} and the model "
            f"{show_count(len(model.layers), 'layer')}: give at least 1 layer per stage"
        )
    return counts


def check_step(scaler: Any, *, one_process: bool) -> None:
    """Whether gradients can be computed here, and scaled."""
    if scaler is not None and not one_process:
        raise ConfigError(
            "a GradScaler checks on each rank alone whether gradients are finite, so ranks would skip different "
            "steps: use pipe.training(optimizer, scaler=...), or bfloat16, which needs no scaler"
        )
    if not torch.is_grad_enabled():
        raise ConfigError(
            "step computes gradients, but they are switched off here: call it outside no_grad, or use evaluate"
        )


def scaled(weights: Sequence[float], scaler: Any, device: torch.device) -> Sequence[Tensor | float]:
    """The weights times the scale of a GradScaler, which is a power of two: the losses' other bits stay."""
    if scaler is None:
        return weights
    return [scaler.scale(torch.tensor(weight, device=device)) if weight else 0.0 for weight in weights]
