"""What else there is: listed beside the plans with what it would bring, and never chosen.

pipedream, 2bw   no bubble, since there is no flush, but gradients of older weights: `Pipeline.stream` runs them
dapple           every stage has as many replicas as it needs, with a flush: a mesh of ranks has the same for all

Their stages and replicas are those that are best without a flush, for microbatches of the size of the best plan.
Nothing is recomputed; what does not fit then is not listed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from gapless.errors import PlanError
from gapless.plan.asynchronous.replicate import Replication, replicate
from gapless.plan.plan import Plan
from gapless.plan.profile.contention import ALONE
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Layer, Profile, Seconds
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate

_MOST = 6_500  # layers times devices times devices: what takes about a second

Why = Literal["asynchronous", "not runnable yet"]


@dataclass(frozen=True)
class Alternative:
    """`replicas`: the devices of each stage. `seconds`: for as many samples as a step has. `memory`: of the fullest."""

    name: str
    why: Why
    partition: tuple[int, ...]
    replicas: tuple[int, ...]
    microbatches: int
    samples: int
    seconds: float
    memory: int


def alternatives(profile: Profile, devices: Sequence[Device], best: Plan) -> list[Alternative]:
    """For devices that are alike, each with processors of its own; of other machines too little is known. The quickest
    comes first.
    """
    K = len(devices)
    alike = len(set(devices)) == 1 and devices[0].speed == 1  # a link is no quicker on a quick device
    if not alike or profile.contention != ALONE or not 1 < K <= _most_devices(profile):
        return []
    found = _Alternatives(
        profile.scaled(best.samples), devices[0], K, math.ceil(best.minibatch / best.samples), best.samples
    )
    listed = (*found.pipedream(), *found.two_versions(), *found.dapple())
    return sorted(listed, key=lambda other: other.seconds)


def _most_devices(profile: Profile) -> int:
    return math.isqrt(_MOST // len(profile.layers))


@dataclass(frozen=True)
class _Alternatives:
    profile: Profile  # for a microbatch
    device: Device
    num_devices: int
    microbatches: int
    samples: int

    def pipedream(self) -> Iterator[Alternative]:
        """Each microbatch has an update of its own, which is a part of its backward here."""
        layers = tuple(_with_update(layer) for layer in self.profile.layers)
        found = self._replicated(replace(self.profile, layers=layers), self.device.memory)
        if found is not None:
            seconds = self.microbatches * (found.seconds + self._entry)
            yield self._other("pipedream", "asynchronous", found, seconds, max(found.memory))

    def two_versions(self) -> Iterator[Alternative]:
        """One update for all microbatches, which must be as many as there are stages."""
        found = self._replicated(self.profile, None, straight=True)
        if found is None or self.microbatches < len(found.partition):
            return
        held, updates = [], []
        for number, layers in enumerate(self._stages(found)):
            versions = sum(layer.kept() + layer.parameters for layer in layers)
            held.append(self._held(versions, layers, len(found.partition) - number))
            updates.append(sum(layer.update.median for layer in layers))
        if self._fits(max(held)):
            seconds = self.microbatches * (found.seconds + self._entry) + max(updates)
            yield self._other("2bw", "asynchronous", found, seconds, max(held))

    def dapple(self) -> Iterator[Alternative]:
        """1f1b, whose stages share out each microbatch among their replicas and add up their gradients at the end."""
        found = self._replicated(self.profile, None)
        if found is None or len(set(found.replicas)) == 1 or max(found.replicas) > self.samples:
            return
        S = len(found.replicas)
        shares = [math.ceil(self.samples / replicas) / self.samples for replicas in found.replicas]
        stages = [
            [layer.scaled(share) for layer in layers] for share, layers in zip(shares, self._stages(found), strict=True)
        ]
        ends = list(accumulate(found.replicas))
        links = [self.profile.link(end - 1, end) for end in ends[:-1]]
        slowest = max(links, key=lambda link: link.latency + link.seconds(max(e.boundary for e in self.profile.layers)))
        entry = self.profile.entry
        costs = Costs(
            forward=[entry.forward + sum(e.forward.median for e in own) for own in stages],
            input_grad=[entry.backward + sum(e.whole_backward for e in own) for own in stages],
            weight_grad=[0.0] * S,
            boundary=[self.profile.input, *(own[-1].boundary for own in self._stages(found)[:-1])],
            latency=slowest.latency,
            bandwidth=slowest.bandwidth,
        )
        timeline = simulate(make_schedule("1f1b", devices=S, microbatches=self.microbatches), costs)
        last, held = 0.0, []
        for number, (own, replicas, end) in enumerate(zip(stages, found.replicas, ends, strict=True)):
            link = self.profile.link(end - replicas, end - 1)
            done = float(timeline.ends[number][-1]) + link.all_reduce(sum(e.gradients for e in own), replicas)
            last = max(last, done + sum(e.update.median for e in own))
            held.append(self._held(sum(e.kept() for e in own), own, S - number))
        if self._fits(max(held)):
            yield self._other("dapple", "not runnable yet", found, last, max(held))

    @property
    def _entry(self) -> float:
        return self.profile.entry.forward + self.profile.entry.backward

    def _replicated(self, profile: Profile, memory: int | None, *, straight: bool = False) -> Replication | None:
        try:
            return replicate(profile, self.num_devices, memory=memory, straight=straight)
        except PlanError:
            return None

    def _stages(self, found: Replication) -> list[Sequence[Layer]]:
        return [self.profile.layers[a:b] for a, b in pairwise((0, *accumulate(found.partition)))]

    def _held(self, fixed: float, layers: Sequence[Layer], in_flight: int) -> int:
        """Bytes at the peak, with so many microbatches under way."""
        comes = min(in_flight, self.microbatches) * sum(layer.activation for layer in layers)
        comes += max(layer.most_workspace for layer in layers)
        return math.ceil(self.profile.reserved + fixed + comes * (1 + self.profile.slack))

    def _fits(self, held: int) -> bool:
        return self.device.memory is None or held <= self.device.memory

    def _other(self, name: str, why: Why, found: Replication, seconds: float, memory: int) -> Alternative:
        return Alternative(name, why, found.partition, found.replicas, self.microbatches, self.samples, seconds, memory)


def _with_update(layer: Layer) -> Layer:
    later = layer.update.median
    return replace(
        layer,
        weight_grad=Seconds(layer.weight_grad.median + later),
        backward=None if layer.backward is None else Seconds(layer.backward.median + later),
    )
