"""From a model to a plan: measure it, search, and measure again if the best plan has microbatches of another size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, PlanError
from gapless.model.layers import Layer, Layers, is_sequence
from gapless.plan import units
from gapless.plan.machine import Device
from gapless.plan.measure import hop, measure
from gapless.plan.plan import Plan
from gapless.plan.profile import Link, Profile
from gapless.plan.search import Found, search
from gapless.plan.task import Optimizer
from gapless.stage import microbatch as mb
from gapless.stage.batchnorm import BatchNorm

Devices = int | Sequence[torch.device | str]
Memory = int | str | Sequence[int | str]
Progress = Callable[[str], None]

_DEPTH = 4  # microbatches per device to begin with
_ROUNDS = 3  # of measuring and searching


def make_plan(
    model: nn.Module | Sequence[Layer],
    example: Any,
    target: Any = None,
    *,
    devices: Devices,
    loss: Callable[[Any, Any], Tensor] | None = None,
    memory: Memory | None = None,
    microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    layers: Sequence[Layer] | None = None,
    optimizer: Optimizer | None = torch.optim.AdamW,
    batchnorm: BatchNorm = "microbatch",
    replicas: bool = False,
    links: Sequence[Link] | None = None,
    batch_dims: Any = None,
    slack: float | None = None,
    seconds: float = 10.0,
    time_limit: float = 60.0,
    progress: Progress | None = None,
) -> Plan:
    """The quickest plan for this model that fits: `Pipeline(model, schedule=plan, ...)` takes it as it is.

    example, target  a minibatch, as `step` takes it; `target` where there is a loss
    devices          how many, or a list of torch devices, all of one kind, of which the first is measured
    memory           bytes of each device, or as "24GiB"; a list has one for each; by default what a GPU has, and no
                     limit on the CPU
    microbatches     only this many; by default several numbers are tried
    schedules        only these; by default all with a flush
    layers           of a module that is no sequence: callables that together are the model
    optimizer        makes the optimizer, whose state and step are measured; None for one without either
    replicas         for a mesh: several pipelines side by side are tried too
    links            between the devices; by default between threads, as measured
    slack            what the allocator loses, as a share of what comes and goes; by default what it is known to lose
    seconds          about how long to measure, at most three times
    time_limit       seconds to search, each time
    """
    progress = progress or (lambda line: None)
    parts = _layers(model, layers)
    there = _devices(devices)
    memories = _memories(memory, there)
    size = mb.batch_size(example, batch_dims)
    links = _links(there) if links is None else tuple(links)
    asked = microbatches if microbatches is not None else min(size, _DEPTH * len(there))
    profiles: dict[int, Profile] = {}  # by the samples in a microbatch
    found: Found | None = None
    for _ in range(_ROUNDS):
        inputs = mb.split(example, asked, batch_dims)[0]
        samples = mb.sizes(size, min(asked, size))[0]
        targets = None if target is None else mb.split(target, min(asked, size), size=size)[0]
        progress(f"measuring {len(parts)} layers with microbatches of {samples}")
        profile = measure(
            parts,
            inputs,
            targets,
            loss=loss,
            device=there[0],
            optimizer=optimizer,
            batchnorm=batchnorm,
            threads=max(1, torch.get_num_threads() // len(there)),
            side_by_side=len(there),
            seconds=seconds / (1 if not profiles else 2),
            name=type(model).__name__,
        )
        profiles[samples] = _with(profile, links, samples, size)
        progress("searching")
        found = _searched(profiles, there, memories, size, microbatches, schedules, replicas, slack, time_limit)
        if found.best.samples in profiles:
            break
        asked = found.best.microbatches * found.best.mesh.replicas
    assert found is not None
    return found.best


def _searched(
    profiles: dict[int, Profile],
    there: Sequence[torch.device],
    memories: Sequence[int | None],
    minibatch: int,
    microbatches: int | None,
    schedules: Sequence[str] | None,
    replicas: bool,
    slack: float | None,
    time_limit: float,
) -> Found:
    """With every size that was measured; sizes that were not are scaled from the nearest one."""
    founds, errors = [], []
    for profile in profiles.values():
        try:
            founds.append(
                search(
                    profile,
                    [Device(memory) for memory in memories],
                    minibatch=minibatch,
                    microbatches=microbatches,
                    recipes=schedules,
                    replicas=replicas,
                    slack=slack,
                    time_limit=time_limit,
                )
            )
        except PlanError as error:
            errors.append(error)
    if not founds:
        raise errors[-1]
    known = [found for found, samples in zip(founds, profiles, strict=False) if found.best.samples == samples]
    return min(known or founds[-1:], key=lambda found: found.best.step_seconds)


def _with(profile: Profile, links: Sequence[Link], samples: int, minibatch: int) -> Profile:
    return replace(profile, links=tuple(links), samples=samples, minibatch=minibatch)


def _layers(model: Any, layers: Sequence[Layer] | None) -> list[Layer]:
    if layers is None and not is_sequence(model):
        raise ConfigError(
            f"a {type(model).__name__} is no sequence of layers, and a plan counts layers: give them with layers=, "
            "callables that together are the model"
        )
    return Layers(model, layers).layers


def _devices(devices: Devices) -> list[torch.device]:
    if isinstance(devices, str):
        raise ConfigError(f"devices is {devices!r}, but it must be a number or a list, as [{devices!r}, {devices!r}]")
    if isinstance(devices, int):
        if isinstance(devices, bool) or devices < 1:
            raise ConfigError(f"devices is {devices!r}, but it must be a whole number of at least 1")
        if torch.cuda.device_count() >= devices:
            return [torch.device("cuda", index) for index in range(devices)]
        return [torch.device("cpu")] * devices
    made = [torch.device(device) for device in devices]
    if not made:
        raise ConfigError("devices is empty, but a plan needs at least 1")
    if len({device.type for device in made}) > 1:
        raise ConfigError(
            f"devices are {', '.join(sorted({device.type for device in made}))}, but a plan is for one kind"
        )
    return made


def _memories(memory: Memory | None, there: Sequence[torch.device]) -> list[int | None]:
    """Of each device; GPUs that are there several times share theirs."""
    if memory is None:
        if there[0].type != "cuda":
            return [None] * len(there)
        return [torch.cuda.get_device_properties(each).total_memory // there.count(each) for each in there]
    listed = [memory] * len(there) if isinstance(memory, int | str) else list(memory)
    if len(listed) != len(there):
        raise ConfigError(f"memory lists {len(listed)} devices, but there are {len(there)}")
    try:
        return [units.read_bytes(each) for each in listed]
    except ConfigError as error:
        raise ConfigError(f"memory {error}") from None


def _links(there: Sequence[torch.device]) -> tuple[Link, ...]:
    if len(there) < 2 or there[0].type != "cpu":
        return ()
    return (hop(),)
