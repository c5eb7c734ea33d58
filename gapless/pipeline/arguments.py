"""What a user asks of a pipeline, checked: a fact, its numbers and the way out where it can't be done."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gapless.errors import ConfigError, PartitionError, ScheduleError
from gapless.model.layers import Layers
from gapless.model.materialise import on_meta
from gapless.plan.partition import balanced, check_enough_layers
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import RECIPES
from gapless.schedule.verify import verify


def check_options(schedule: Any, loss: Any, loss_weight: Any) -> None:
    if not isinstance(schedule, str | Schedule):
        raise ConfigError(f"schedule is a {type(schedule).__name__}, but it must be a name or a Schedule")
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r:.40}, but it must be a function of the outputs and the target")
    if not (loss_weight is None or loss_weight == "sum" or callable(loss_weight)):
        raise ConfigError(f"loss_weight is {loss_weight!r:.40}, but it must be None, 'sum' or a function of a target")


def check_data(layer: nn.Module, way_out: str = "give init=, a function or a checkpoint that fills it") -> None:
    empty = on_meta([layer])
    if empty:
        raise ConfigError(f"{empty[0]} of a {type(layer).__name__} is on the meta device, without data: {way_out}")


def check_uncounted(partition: Sequence[int] | None) -> None:
    if partition is not None:
        raise PartitionError(
            "partition counts the layers of a sequence, and a module is traced and cut by cost: leave it out, or give "
            "the layers with layers="
        )


def one_of(word: str, value: Any, known: Sequence[str]) -> Any:
    if value not in known:
        raise ConfigError(f"{word}={value!r}: it is {' or '.join(repr(name) for name in known)}")
    return value


def torch_devices(devices: int | Sequence[torch.device | str]) -> list[torch.device]:
    if isinstance(devices, int):
        count = at_least_one("devices", devices)
        if torch.cuda.device_count() >= count:
            return [torch.device("cuda", index) for index in range(count)]
        return [torch.device("cpu")] * count
    if isinstance(devices, str):
        raise ConfigError(f"devices is {devices!r}, but it must be a number or a list, as [{devices!r}, {devices!r}]")
    made = [torch.device(device) for device in devices]
    at_least_one("devices", len(made))
    for device in made:
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {device} is neither cpu nor cuda")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {device} is not there: this machine has {torch.cuda.device_count()} CUDA devices"
            )
    return [torch.device("cuda", device.index or 0) if device.type == "cuda" else device for device in made]


def at_least_one(word: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{word} is {value!r}, but it must be a whole number of at least 1")
    return value


def stages_per_device_of(
    schedule: str | Schedule, asked: int | None, partition: Sequence[int] | None, num_devices: int
) -> int | None:
    """As asked, or as many as the partition has, where the recipe leaves a choice."""
    if asked is not None or partition is None or not isinstance(schedule, str):
        return asked
    recipe = RECIPES.get(schedule)
    free = recipe is not None and (recipe.stages_per_device is None or len(recipe.stages_per_device) > 1)
    return len(partition) // num_devices if free and len(partition) % num_devices == 0 else None


def fitting_schedule(schedule: Schedule, num_devices: int, microbatches: int) -> Schedule:
    if schedule.num_devices != num_devices or schedule.num_microbatches != microbatches:
        raise ScheduleError(
            f"the schedule is for {schedule.num_devices} devices and {schedule.num_microbatches} microbatches, but "
            f"this step has {num_devices} devices and {microbatches} microbatches; one by name is made for any number"
        )
    verify(schedule).raise_if_wrong()
    return schedule


def layers_per_stage(model: Layers, num_stages: int, asked: Sequence[int] | None) -> tuple[int, ...]:
    if asked is None:
        return balanced(model.costs(), num_stages)
    counts = tuple(asked)
    check_enough_layers(len(model.layers), num_stages)
    if len(counts) != num_stages or sum(counts) != len(model.layers) or min(counts) < 1:
        raise PartitionError(
            f"partition {list(counts)} has {len(counts)} stages and {sum(counts)} layers, but the schedule has "
            f"{num_stages} stages and the model {len(model.layers)} layers: give at least 1 layer per stage"
        )
    return counts
