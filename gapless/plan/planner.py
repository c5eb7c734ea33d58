"""From a model to a plan: measure it, search, and measure again if the best plan has microbatches of another size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, PlanError
from gapless.model.capture import own_loss
from gapless.model.layers import Layer, Layers, is_sequence
from gapless.plan import units
from gapless.plan.choices import check_recipes
from gapless.plan.machine import Device
from gapless.plan.measure import hop, measure
from gapless.plan.plan import Plan
from gapless.plan.profile import Link, Profile
from gapless.plan.search import Found, search
from gapless.plan.search import Progress as Searched
from gapless.plan.task import Optimizer
from gapless.plan.traced import Graph, Tracer
from gapless.stage import microbatch as mb
from gapless.stage.batchnorm import BatchNorm

Devices = int | Sequence[torch.device | str]
Memory = int | str | Sequence[int | str]
Progress = Callable[[str], None]

_DEPTH = 4  # microbatches per device to begin with
_ROUNDS = 3  # of measuring and searching


class Planned(NamedTuple):
    """All that was found, and the profile it was found with."""

    profile: Profile
    found: Found


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
    layers           of a module that can't be traced: callables that together are the model
    optimizer        makes the optimizer, whose state and step are measured; None for one without either
    replicas         for a mesh: several pipelines side by side are tried too
    links            between the devices; by default between threads, as measured
    slack            what the allocator loses, as a share of what comes and goes; by default what it is known to lose
    seconds          about how long to measure, at most three times
    time_limit       seconds to search, each time
    """
    return planned(
        model,
        example,
        target,
        devices=devices,
        loss=loss,
        memory=memory,
        microbatches=microbatches,
        schedules=schedules,
        layers=layers,
        optimizer=optimizer,
        batchnorm=batchnorm,
        replicas=replicas,
        links=links,
        batch_dims=batch_dims,
        slack=slack,
        seconds=seconds,
        time_limit=time_limit,
        progress=progress,
    ).found.best


def planned(
    model: nn.Module | Sequence[Layer],
    example: Any,
    target: Any = None,
    *,
    devices: Devices,
    loss: Callable[[Any, Any], Tensor] | None = None,
    memory: Memory | None = None,
    speeds: Sequence[float] | None = None,
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
    name: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """As `make_plan`, with every plan that was found and the profile.

    speeds  of the devices as shares of the first one's, where they differ
    name    of the profile
    """
    told = progress or (lambda line: None)
    if schedules is not None:
        check_recipes(schedules)
    there = _devices(devices)
    parts: Sequence[Layer] = ()
    names: Sequence[str] | None = None
    tracer: Tracer | None = None
    if layers is not None or is_sequence(model):
        parts = Layers(model, layers).layers
    else:
        assert isinstance(model, nn.Module)
        tracer, loss = Tracer(model, there[0], len(there)), loss or own_loss
    machine = [Device(*pair) for pair in zip(_memories(memory, there), speeds or [1.0] * len(there), strict=True)]
    size = mb.batch_size(example, batch_dims)
    links = _links(there) if links is None else tuple(links)
    asked = microbatches if microbatches is not None else min(size, _DEPTH * len(there))
    profiles: dict[int, Profile] = {}  # by the samples in a microbatch
    graphs: dict[int, Graph] = {}  # likewise
    best: Planned | None = None
    for _ in range(_ROUNDS):
        inputs = mb.split(example, asked, batch_dims)[0]
        samples = mb.sizes(size, min(asked, size))[0]
        targets = None if target is None else mb.split(target, min(asked, size), size=size)[0]
        if tracer is not None:
            told("tracing")
            graphs[samples], inputs = tracer.graph(inputs)
            parts, names = graphs[samples].layers, graphs[samples].names
        told(f"measuring {len(parts)} layers with microbatches of {samples}")
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
            name=name or type(model).__name__,
            names=names,
        )
        profiles[samples] = _with(profile, links, samples, size)
        best = _searched(
            profiles,
            machine,
            size,
            microbatches,
            schedules,
            replicas,
            slack,
            time_limit,
            lambda searched: told(f"searching: {searched}"),
        )
        plan = best.found.best
        if plan.samples in profiles:
            break
        asked = plan.microbatches * plan.mesh.replicas
    assert best is not None
    return best if tracer is None else Planned(best.profile, graphs[best.profile.samples].with_cuts(best.found))


def _searched(
    profiles: dict[int, Profile],
    machine: Sequence[Device],
    minibatch: int,
    microbatches: int | None,
    schedules: Sequence[str] | None,
    replicas: bool,
    slack: float | None,
    time_limit: float,
    progress: Callable[[Searched], None],
) -> Planned:
    """With every size that was measured; sizes that were not are scaled from the nearest one."""
    made, errors = [], []
    for profile in profiles.values():
        try:
            found = search(
                profile,
                machine,
                minibatch=minibatch,
                microbatches=microbatches,
                recipes=schedules,
                replicas=replicas,
                slack=slack,
                time_limit=time_limit,
                progress=progress,
            )
            made.append(Planned(profile, found))
        except PlanError as error:
            errors.append(error)
    if not made:
        raise errors[-1]
    known = [each for each in made if each.found.best.samples == each.profile.samples]
    return min(known or made[-1:], key=lambda each: each.found.best.step_seconds)


def _with(profile: Profile, links: Sequence[Link], samples: int, minibatch: int) -> Profile:
    return replace(profile, links=tuple(links), samples=samples, minibatch=minibatch)


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
