"""From a model to a plan, in one process or on all ranks of a mesh, for which the links between them are measured."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gapless.model.layers import Layer
from gapless.pipeline.arguments.checks import check_where
from gapless.plan.plan import Plan
from gapless.plan.planner import Memory, Planned, Progress, planned
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.measure import cores
from gapless.plan.profile.profile import Link, read_host
from gapless.plan.profile.task import Optimizer
from gapless.plan.search.search_options import Offload, SearchOptions
from gapless.slow_work import slow_work
from gapless.stage.compiled import uncompiled
from gapless.stage.devices import Devices
from gapless.stage.norm.running_statistics import BatchNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gapless.run.ranks.link_speed import Hop

Links = Sequence[Link]


def make_plan(
    model: nn.Module | Sequence[Layer],
    example: Any,
    target: Any = None,
    *,
    devices: Devices | None = None,
    mesh: "DeviceMesh | None" = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    memory: Memory | None = None,
    microbatches: int | None = None,
    schedules: Sequence[str] | None = None,
    layers: Sequence[Layer] | None = None,
    optimizer: Optimizer | None = torch.optim.AdamW,
    batchnorm: BatchNorm = "microbatch",
    replicas: bool = False,
    links: Links | None = None,
    batch_dims: Any = None,
    slack: float | None = None,
    seconds: float = 10.0,
    flops: float | None = None,
    offload: Offload = "none",
    host_bandwidth: float | str | None = None,
    host_memory: int | str | None = None,
    overlap: bool = False,
    time_limit: float = 60.0,
    timeout: float = 600.0,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan for this model that fits, for `Pipeline(model, schedule=plan, ...)`.

    model         as `Pipeline` takes it
    example       the inputs of a minibatch, as `step` takes them
    target        its target, if there is a loss
    devices       how many, or a list of torch devices of one kind. The first one is measured
    mesh          instead of `devices`, under torchrun: every rank calls this and gets the same plan. The first rank
                  measures the layers. `plan.caution` says what it could not measure
    loss          loss(outputs, target), as `Pipeline` takes it
    memory        bytes of each device, or such as "24GiB", or a list. By default a GPU's, and no limit on the CPU
    microbatches  plan for this number only; by default several are tried
    schedules     try these only; by default all that have a flush
    layers        for a module that can't be traced: the list of callables that make up the model
    optimizer     makes the optimizer whose memory and time are measured; None if there is none
    batchnorm     as `Pipeline` takes it
    replicas      also try several pipelines side by side, whatever the mesh is. `plan.mesh` says which was chosen
    links         between the devices; by default they are measured
    batch_dims    as `Pipeline` takes it
    slack         memory that the allocator loses, as a fraction of temporary memory; by default its usual loss
    seconds       about how long to measure, up to three times
    flops         speed of a device in FLOP/s, such as 4e14: nothing is run, times are FLOPs at this speed, and
                  sizes are those of tensors without data. The model may be on the meta device
    offload       what may be in host memory: "activations", the "optimizer" (`gapless.offload_optimizer`) or "both"
    host_bandwidth  of the link between a device and its host, such as "25GB/s"; by default it is measured
    host_memory   what each device may have there, such as "64GiB"; by default there is no limit
    overlap       train with `Pipeline.training`, which keeps a copy of parameters and optimizer state
    time_limit    seconds to search, each time
    timeout       under a mesh: seconds without a heartbeat or progress of a rank before all ranks give up
    progress      called with a line of text now and then
    """
    check_where(devices, mesh)
    wanted = SearchOptions(microbatches, schedules, replicas, slack=slack, time_limit=time_limit, offload=offload)
    wanted = replace(wanted, overlap=overlap)
    make = partial(
        planned,
        uncompiled(model)[0],
        example,
        target,
        loss=loss,
        layers=layers,
        optimizer=optimizer,
        batchnorm=batchnorm,
        batch_dims=batch_dims,
        seconds=seconds,
        flops=flops,
        host=read_host(host_bandwidth, host_memory),
        progress=progress,
    )
    with nullcontext() if progress else slow_work("measuring layers and searching for a plan"):
        if devices is not None:
            return make(devices=devices, wanted=wanted, memory=memory, links=links).found.best
        return _on_ranks(make, mesh, wanted, memory, links, timeout)


def _on_ranks(
    make: Callable[..., Planned],
    mesh: Any,
    wanted: SearchOptions,
    memory: Memory | None,
    links: Links | None,
    timeout: float,
) -> Plan:
    """The first rank plans for all, with the hops between them as they are measured."""
    from gapless.run.ranks.link_speed import measured_line  # here alone: torch.distributed need not be there
    from gapless.run.ranks.mesh_position import mesh_position
    from gapless.run.ranks.wire.gpu_memory.slots import most_bytes

    position = mesh_position(mesh)
    if memory is None and position.torch_device.type == "cuda":
        memory = torch.cuda.get_device_properties(position.torch_device).total_memory
    if not wanted.replicas:
        shape = Mesh(position.num_replicas, position.num_devices, inside=position.replicas_inside)
        wanted = replace(wanted, mesh=shape)
    with measured_line(mesh, timeout) as line:
        hops = line.hops()

        def made() -> str:
            best = make(
                devices=line.devices,
                wanted=wanted,
                memory=memory,
                links=levels(hops) if links is None else links,
                threads=torch.get_num_threads(),
                side_by_side=len(line.devices) if all(hop.near for hop in hops) else 1,
                slots=most_bytes if position.torch_device.type == "cuda" else None,
            ).found.best
            if position.torch_device.type == "cpu" and len(line.devices) > 1 and all(hop.near for hop in hops):
                best = replace(best, caution=_shared_host(len(line.devices)))
            return json.dumps(best.to_json())

        return Plan.from_json(json.loads(line.from_first(made)))


def _shared_host(ranks: int) -> str:
    """What nobody has measured: the first rank has threads stand for the others."""
    turns = " and take turns" if ranks > cores() else ""
    return (
        f"{ranks} CPU ranks share the {cores()} processors of one host{turns}. What they cost each other was measured "
        "between threads of one process, so a step may differ from the prediction by more than 10%: run a few to know"
    )


def measure_links(mesh: "DeviceMesh", timeout: float = 600.0) -> tuple[Link, ...]:
    """Between the ranks of a mesh, under torchrun: within a host and between hosts, each as slow as its slowest hop.

    Every rank calls it, and all get the same. Hops go from each rank to the next in the order of the mesh, one after
    another, through the channels that a pipeline uses there. `make_plan(..., links=measure_links(mesh))` plans with
    them.
    """
    from gapless.run.ranks.link_speed import measured_line  # here alone: torch.distributed need not be there

    with measured_line(mesh, timeout) as line:
        return levels(line.hops())


def levels(hops: "list[Hop]") -> tuple[Link, ...]:
    """From the innermost out. Hosts that hold different numbers of devices make one level, with the slowest of all."""
    if not hops:
        return ()
    far = [place for place, hop in enumerate(hops, start=1) if not hop.near]
    if not far:
        return (_slowest("one host", None, hops),)
    each, count = far[0], len(hops) + 1
    if far != list(range(each, count, each)) or count % each:
        return (_slowest("the slowest hop", None, hops),)
    inner, between = ([hop for hop in hops if hop.near == near] for near in (True, False))
    return (*([_slowest("one host", each, inner)] if inner else []), _slowest("between hosts", None, between))


def _slowest(name: str, devices: int | None, hops: "list[Hop]") -> Link:
    return Link(name, devices, max(hop.latency for hop in hops), min(hop.bandwidth for hop in hops))
