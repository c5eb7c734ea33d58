"""From a model to a plan: measure it, search, and measure again if the best plan has microbatches of another size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, PlanError
from gapless.model.capture import own_loss
from gapless.model.layers import Layer, Layers, is_sequence
from gapless.plan import units
from gapless.plan.choices import check_recipes
from gapless.plan.machine import Device, Mesh
from gapless.plan.measure import hop, measure
from gapless.plan.profile import Link, Profile
from gapless.plan.search import Found, search
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
    mesh: Mesh | None = None,
    links: Sequence[Link] | None = None,
    batch_dims: Any = None,
    slack: float | None = None,
    threads: int | None = None,
    side_by_side: int | None = None,
    seconds: float = 10.0,
    time_limit: float = 60.0,
    name: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """As `gapless.make_plan`, with every plan that was found and the profile.

    speeds        of the devices as shares of the first one's, where they differ
    mesh          only this one; then the example is the share of one replica
    threads       intra-op threads of a CPU device; by default the caller's, shared among the devices
    side_by_side  how many of the devices share this machine's processors; all of them unless given
    name          of the profile
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
    pipelines = 1 if mesh is None else mesh.replicas  # that have a minibatch like the example each
    links = _links(there) if links is None else tuple(links)
    asked = microbatches if microbatches is not None else min(size, _DEPTH * len(there) // pipelines)
    find = partial(
        search,
        devices=machine,
        minibatch=pipelines * size,
        microbatches=microbatches,
        recipes=schedules,
        replicas=replicas,
        mesh=mesh,
        slack=slack,
        time_limit=time_limit,
        progress=lambda searched: told(f"searching: {searched}"),
    )
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
            threads=threads or max(1, torch.get_num_threads() // len(there)),
            side_by_side=side_by_side or len(there),
            seconds=seconds / (1 if not profiles else 2),
            name=name or type(model).__name__,
            names=names,
        )
        profiles[samples] = replace(profile, links=links, samples=samples, minibatch=pipelines * size)
        best = _searched(profiles, find)
        plan = best.found.best
        if plan.samples in profiles:
            break
        asked = plan.microbatches * plan.mesh.replicas // pipelines
    assert best is not None
    return best if tracer is None else Planned(best.profile, graphs[best.profile.samples].with_cuts(best.found))


def _searched(profiles: dict[int, Profile], find: Callable[[Profile], Found]) -> Planned:
    """With every size that was measured; sizes that were not are scaled from the nearest one."""
    made, errors = [], []
    for profile in profiles.values():
        try:
            made.append(Planned(profile, find(profile)))
        except PlanError as error:
            errors.append(error)
    if not made:
        raise errors[-1]
    known = [each for each in made if each.found.best.samples == each.profile.samples]
    return min(known or made[-1:], key=lambda each: each.found.best.step_seconds)


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
