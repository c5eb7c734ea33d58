"""From a model to a plan: measure it, search, and measure again if the best plan has microbatches of another size."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gapless import units
from gapless.errors import ConfigError, PlanError
from gapless.model.layers import Layer, Layers, is_sequence
from gapless.model.traced.capture import own_loss
from gapless.plan.explain import assumed, explained
from gapless.plan.plan import Plan, Searched
from gapless.plan.profile import profile as profiled
from gapless.plan.profile.machine import Device
from gapless.plan.profile.measure import hop, measure_layers
from gapless.plan.profile.profile import ANY_HOST, Host, Link, Profile
from gapless.plan.profile.traced import Graph, Tracer
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import ANYTHING, SearchOptions, check_number
from gapless.stage.batch import microbatch as mb
from gapless.stage.devices import Devices, torch_devices
from gapless.stage.offload.host_link import link_speed

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
    wanted: SearchOptions = ANYTHING,
    loss: Callable[[Any, Any], Tensor] | None = None,
    layers: Sequence[Layer] | None = None,
    memory: Memory | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[Link] | None = None,
    batch_dims: Any = None,
    threads: int | None = None,
    side_by_side: int | None = None,
    slots: Callable[[int], int] | None = None,
    seconds: float = 10.0,
    flops: float | None = None,
    name: str | None = None,
    host: Host = ANY_HOST,
    progress: Progress | None = None,
    **measured: Any,
) -> Planned:
    """As `gapless.make_plan`, with every plan that was found and the profile.

    speeds        of the devices as shares of the first one's, where they differ
    wanted.mesh   where it is given, the example is the share of one replica
    threads       intra-op threads of a CPU device; by default the caller's, shared among the devices
    side_by_side  how many of the devices share this machine's processors; all of them unless given
    slots         what messages keep on a device, in bytes, by the size of the largest of them
    name          of the profile
    host          what is known of it; its link is measured unless that has a bandwidth
    measured      what else `measure` takes
    """
    told = progress or (lambda line: None)
    check_number("seconds", seconds)
    there = _devices(devices)
    machine = [Device(*pair) for pair in zip(_memories(memory, there), speeds or [1.0] * len(there), strict=True)]
    size = mb.batch_size(example, batch_dims)
    pipelines = 1 if wanted.mesh is None else wanted.mesh.replicas  # that have a minibatch like the example each

    def part(count: int) -> tuple[Any, Any, int]:
        """The first of so many parts of the minibatch: inputs, target and samples."""
        own = None if target is None else mb.split(target, min(count, size), size=size)[0]
        return mb.split(example, count, batch_dims)[0], own, mb.sizes(size, min(count, size))[0]

    if links is None:
        links = (hop(),) if len(there) > 1 and there[0].type == "cpu" and flops is None else ()
    if layers is not None or is_sequence(model):
        source: Sequence[Layer] | Tracer = Layers(model, layers).layers
    else:
        assert isinstance(model, nn.Module)
        source, loss = Tracer(model, there[0], len(there)), own_loss if loss is None else loss
        wanted = replace(wanted, remat=("stage",))  # a piece of a graph is one layer to its stage
    measured |= {
        "loss": loss,
        "device": there[0],
        "threads": threads or max(1, torch.get_num_threads() // len(there)),
        "side_by_side": side_by_side or len(there),
        "seconds": seconds / 2,
        "flops": flops,
        "name": name or type(model).__name__,
    }
    known: dict[str, Any] = {"links": tuple(links), "minibatch": pipelines * size}
    if wanted.offload != "none":
        known["host"] = _measured_host(host, there[0], flops)
    profiles = _Profiles(source, part, told, measured, known, slots or (lambda largest: 0))
    made = _best_of_all_sizes(profiles, machine, wanted, size, pipelines, told)
    if flops is None:
        return made
    best = replace(made.found.best, caution=assumed(flops, links))
    return made._replace(found=replace(made.found, plans=(best, *made.found.plans[1:])))


def _best_of_all_sizes(
    profiles: "_Profiles", machine: Sequence[Device], wanted: SearchOptions, size: int, pipelines: int, told: Progress
) -> Planned:
    """Measures and searches until the best plan has microbatches of a size that was measured."""
    if wanted.microbatches is not None:
        asked = [wanted.microbatches]
    else:  # and twice as many samples, which tells what does not grow with them
        most = min(size, _DEPTH * len(machine) // pipelines)
        asked = [most, max(1, most // 2)]
    founds: dict[int, Found] = {}  # by the samples in a microbatch
    for _ in range(_ROUNDS):
        for count in asked:
            profiles.measure(count)
        errors = []
        for samples, profile in _with_overheads(profiles.found).items():
            if samples not in founds:
                try:
                    found = search(
                        profile, machine, wanted, pipelines * size, lambda searched: told(f"searching: {searched}")
                    )
                    founds[samples] = profiles.with_cuts(samples, found)
                except PlanError as error:
                    errors.append(error)
        if not founds:
            raise errors[-1]
        best = _merged(profiles.found, founds)
        plan = best.found.best
        count = plan.microbatches * plan.mesh.replicas // pipelines
        if plan.samples in profiles.found or count in asked:
            break
        asked = [count]
    return best


class _Profiles:
    """Profiles of a model, by the samples in a microbatch."""

    def __init__(
        self,
        source: Sequence[Layer] | Tracer,
        part: Callable[[int], tuple[Any, Any, int]],
        told: Progress,
        measured: Mapping[str, Any],
        known: Mapping[str, Any],
        slots: Callable[[int], int],
    ) -> None:
        """`measured`: what `measure` takes; `known`: what a profile has that is not measured."""
        self._source, self._part, self._told, self._measured, self._known = source, part, told, measured, known
        self._slots = slots
        self._graphs: dict[int, Graph] = {}
        self.found: dict[int, Profile] = {}

    def measure(self, count: int) -> None:
        """With a minibatch in so many parts. What does not fit the device is left out, if anything else did."""
        inputs, target, samples = self._part(count)
        if samples in self.found:
            return
        layers, names = self._source, None
        if isinstance(layers, Tracer):
            self._told("tracing")
            graph, inputs = layers.graph(inputs)
            self._graphs[samples], layers, names = graph, graph.layers, graph.names
        self._told(f"measuring {units.show_count(len(layers), 'layer')} with microbatches of {samples}")
        try:
            found = measure_layers(layers, inputs, target, names=names, **self._measured)
        except torch.OutOfMemoryError:
            if self.found:
                return
            raise
        except (AttributeError, TypeError) as error:
            if target is None and self._measured["loss"] not in (None, own_loss):
                raise ConfigError(
                    f"no target was given, and the loss failed without one ({error}): pass a target after the example"
                ) from error
            raise
        kept = self._slots(max(layer.boundary for layer in found.layers))
        self.found[samples] = replace(found, samples=samples, reserved=found.reserved + kept, **self._known)

    def with_cuts(self, samples: int, found: Found) -> Found:
        """Plans of a traced model say where its graph is cut."""
        graph = self._graphs.get(samples)
        if graph is None:
            return found
        return replace(found, plans=tuple(replace(plan, cuts=graph.cuts(plan.partition)) for plan in found.plans))


def _with_overheads(profiles: Mapping[int, Profile]) -> dict[int, Profile]:
    """What layers take for microbatches of two sizes tells what does not grow with the samples."""
    if len(profiles) < 2:
        return dict(profiles)
    found = dict(profiles)
    for samples, profile in profiles.items():
        other = profiles[next(each for each in profiles if each != samples)]
        if len(other.layers) == len(profile.layers):  # the same graph
            pairs, ratio = zip(profile.layers, other.layers, strict=True), other.samples / samples
            layers = tuple(replace(layer, overhead=_overhead(layer, twin, ratio)) for layer, twin in pairs)
            found[samples] = replace(profile, layers=layers)
    return found


def _overhead(layer: profiled.Layer, twin: profiled.Layer, ratio: float) -> float:
    """The same for a forward and for a backward; `twin` is the layer for `ratio` times the samples."""
    one, other = (each.work for each in (layer, twin))
    return min(one, max(0.0, (ratio * one - other) / (ratio - 1))) / 2


def _merged(profiles: Mapping[int, Profile], founds: Mapping[int, Found]) -> Planned:
    """All plans of all sizes, each with the costs of the size that is nearest to it of those that found such plans."""
    near: dict[int, int] = {}
    for measured, found in founds.items():
        for plan in found.plans:
            both = (measured, near.get(plan.samples, measured))
            near[plan.samples] = min(both, key=lambda size: (abs(math.log(size / plan.samples)), size))
    plans = [plan for samples, found in founds.items() for plan in found.plans if near[plan.samples] == samples]
    plans.sort(key=lambda plan: plan.step_seconds)
    samples = near[plans[0].samples]
    found = founds[samples]
    text = explained(plans, len(found.rejected))
    searched = _of_all(plans[0], founds.values())
    plans[0] = replace(plans[0], searched=searched)
    return Planned(profiles[samples], Found(tuple(plans), found.rejected, text, searched))


def _of_all(best: Plan, founds: Collection[Found]) -> Searched:
    """How far all sizes were searched. The bound is the least of all: what was not tried may be of any size."""
    least = min(found.best.step_seconds * (1 - found.searched.gap) for found in founds)
    parts = [found.searched for found in founds]
    return replace(
        parts[0],
        gap=max(0.0, 1 - least / best.step_seconds),
        complete=all(part.complete for part in parts),
        cut_short=any(part.cut_short for part in parts),
        tried=sum(part.tried for part in parts),
        untried=sum(part.untried for part in parts),
    )


def _measured_host(host: Host, device: torch.device, flops: float | None) -> Host:
    if host.bandwidth is not None:
        return host
    if flops is not None:
        raise ConfigError("with flops= nothing is measured: give host_bandwidth= too to offload, as '25GB/s'")
    latency, bandwidth = link_speed(device)
    return replace(host, latency=latency, bandwidth=bandwidth)


def _devices(devices: Devices) -> list[torch.device]:
    made = torch_devices(devices)
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
        raise ConfigError(f"memory lists {units.show_count(len(listed), 'device')}, but there are {len(there)}")
    try:
        return [units.read_bytes(each) for each in listed]
    except ConfigError as error:
        raise ConfigError(f"memory {error}") from None
