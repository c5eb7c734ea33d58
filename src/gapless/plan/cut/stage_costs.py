"""From the costs of layers to those of stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Layer, Profile
from gapless.schedule.costs import Costs, Number
from gapless.schedule.placement import Placement


@dataclass(frozen=True)
class Stages:
    """The layers of each stage, and what they cost on their devices.

    costs     for the simulator: where links differ, a message on a slower one counts as a larger one
    boundary  the bytes of each stage's input as they are
    remat     of each stage "none", "stage" or "layer"; the costs of one that is recomputed layer by layer have the
              recompute inside the backward, and what it keeps is the input of every layer
    """

    layers: tuple[tuple[Layer, ...], ...]
    placement: Placement
    costs: Costs
    boundary: tuple[int, ...]
    remat: tuple[str, ...]

    @property
    def memory_costs(self) -> Costs:
        return replace(self.costs, boundary=self.boundary)

    def of_device(self, device: int) -> list[Layer]:
        return [layer for stage in self.placement.stages[device] for layer in self.layers[stage]]


def make_stages(
    profile: Profile,
    counts: Sequence[int],
    placement: Placement,
    mesh: Mesh,
    speeds: Sequence[float],
    remat: Sequence[str] | None = None,
) -> Stages:
    """`counts` are the layers per stage, `speeds` those of the devices."""
    modes = ("none",) * len(counts) if remat is None else tuple(remat)
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = tuple(profile.layers[first:last] for first, last in pairwise(ends))
    homes = placement.homes

    def time(of: Callable[[Layer], float], entry: float = 0.0) -> tuple[float, ...]:
        return tuple((entry + sum(map(of, own))) / speeds[home] for own, home in zip(layers, homes, strict=True))

    boundary = (profile.input, *(own[-1].boundary for own in layers[:-1]))
    costs = Costs(
        forward=time(lambda layer: layer.forward.median, profile.entry.forward),
        input_grad=time(lambda layer: layer.input_grad.median, profile.entry.backward),
        weight_grad=time(lambda layer: layer.weight_grad.median),
        recompute=time(lambda layer: layer.recompute.median, profile.entry.forward),
        update=time(lambda layer: layer.update.median),
        backward=time(lambda layer: layer.whole_backward, profile.entry.backward),
        # Layers of one stage hold what passes between them once.
        activation=[max(0, sum(e.activation for e in own) - sum(e.overlap for e in own[1:])) for own in layers],
        # Orders are made as if the gradients that W needs were a part of the activation; `footprint` counts all.
        kept_for_weight_grad=[sum(layer.kept_for_weight_grad for layer in own) for own in layers],
        boundary=boundary,
    )
    if "layer" in modes:
        costs = _layer_by_layer(costs, placement, layers, boundary, modes)
    if profile.host is not None:
        # A stage's input stays, unless it is all that is kept.
        kept = zip(modes, costs.per_stage("activation", placement), boundary, strict=True)
        moved = [
            size if mode == "layer" else into if mode == "stage" else max(0, size - into) for mode, size, into in kept
        ]
        host = profile.host
        costs = replace(costs, host_bandwidth=host.bandwidth, host_latency=host.latency, offloaded=moved)
    return Stages(layers, placement, _with_links(costs, profile, placement, mesh, boundary), boundary, modes)


def _layer_by_layer(
    costs: Costs, placement: Placement, layers: Sequence[Sequence[Layer]], boundary: Sequence[int], modes: Sequence[str]
) -> Costs:
    """Stages that keep the input of each layer, once where it is passed on, and make the rest again inside the
    backward.
    """
    inputs = [
        size + sum(layer.boundary - layer.passed for layer in own[:-1])
        for size, own in zip(boundary, layers, strict=True)
    ]
    late = replace(costs.recomputed_late(placement), activation=inputs)
    changed = {}
    for name in ("input_grad", "backward", "recompute", "activation"):
        pairs = zip(modes, late.per_stage(name, placement), costs.per_stage(name, placement), strict=True)
        changed[name] = [other if mode == "layer" else usual for mode, other, usual in pairs]
    return replace(costs, **changed)  # type: ignore[arg-type]


def _with_links(costs: Costs, profile: Profile, placement: Placement, mesh: Mesh, boundary: Sequence[int]) -> Costs:
    """The simulator knows one latency and one bandwidth: on a slower link a message is so much the larger."""
    homes = placement.homes
    links = {stage: mesh.hop(profile, homes[stage - 1], homes[stage]) for stage in sorted(placement.crossed)}
    if not links:
        return costs
    latency = min(link.latency for link in links.values())
    if len(set(links.values())) == 1:
        return replace(costs, latency=latency, bandwidth=next(iter(links.values())).bandwidth)
    bandwidth = min((link.bandwidth for link in links.values() if link.bandwidth is not None), default=1e12)
    sizes: list[Number] = list(boundary)
    for stage, link in links.items():
        sizes[stage] = (link.seconds(boundary[stage]) + link.latency - latency) * bandwidth
    return replace(costs, latency=latency, bandwidth=bandwidth, boundary=sizes)
