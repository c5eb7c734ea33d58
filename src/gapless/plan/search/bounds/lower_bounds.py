"""What choices take at the least, and about what they take: what is known before a plan of them is made."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from gapless.plan.profile.contention import Contention
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.bounds.bound import Bounds
from gapless.plan.search.bounds.fixed_order import followed_at_once, least_in_order
from gapless.plan.search.bounds.least_work import Limits, layer_works
from gapless.plan.search.choices import Choice, microbatches
from gapless.plan.search.drafts import Drafts, Modes
from gapless.plan.search.estimate import Totals, estimated
from gapless.schedule.action import Schedule


class LowerBounds:
    """Of the choices on the devices that drafts are made for."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self._profile = cache(self._least_held)
        self._bounds = cache(lambda samples: Bounds(self._profile(samples)))
        self._totals = cache(lambda samples, shards: Totals.of(drafts.profile(samples), shards))
        self._least_work = cache(self._all_work)
        self._at_once: dict[int, tuple[Schedule, list[int]]] = {}  # by the identity of a schedule, which is kept

    def _least_held(self, samples: int) -> Profile:
        """Where activations may be offloaded, they may take no memory at all."""
        profile = self.drafts.profile(samples)
        if self.drafts.host is None:
            return profile
        return replace(profile, layers=tuple(replace(e, activation=0, overlap=0) for e in profile.layers))

    def recomputed(
        self,
        choice: Choice,
        counts: Sequence[int],
        modes: Modes,
        plain: Schedule | None = None,
        full: Collection[int] = (),
    ) -> float:
        """What it can't be below if its stages are recomputed so: a device has its work and its recomputes. Without the
        schedule, only the last stage is taken to run backwards right behind its forwards. Devices that are too `full`
        recompute at least one of their stages.
        """
        last = [0] * (len(counts) - 1) + [choice.microbatches]
        kept_ = last if plain is None else self._followed(plain)
        profile, speeds, M = self.drafts.profile(choice.samples), self.drafts.speeds(choice), choice.microbatches
        works = [work.all for work in layer_works(profile, together=False)]
        least, ends = 0.0, [0, *accumulate(counts)]
        for device, own in enumerate(choice.placement.stages):
            busy, some = 0.0, math.inf
            for stage in own:
                layers = slice(ends[stage], ends[stage + 1])
                again = sum(e.recompute.median for e in profile.layers[layers])
                times = M if modes[stage] == "layer" else M - kept_[stage] if modes[stage] == "stage" else 0
                busy += M * sum(works[layers]) + times * again
                some = min(some, (M - kept_[stage]) * again)
            least = max(least, (busy + (some if device in full else 0.0)) / speeds[device])
        return least * _least_slower(profile.contention, choice) * (1 - 1e-9)

    def seconds(self, choice: Choice, enough: float = math.inf) -> float:
        """What no plan of this choice can be below; no more than `enough` is looked for."""
        bounds, speeds = self._bounds(choice.samples), self.drafts.speeds(choice)
        room = self._room(choice)
        parts = choice.recipe, choice.stages_per_device, choice.mesh, choice.microbatches
        return bounds.seconds(*parts, speeds, room, enough)

    def in_order(self, choice: Choice) -> float:
        """The same by what its order holds, where that does not depend on costs; it takes longer to know."""
        room, plain = self._room(choice), self.drafts.fixed_order(choice)
        if room is None or plain is None or choice.mesh.num_devices == 1:
            return 0.0
        profile, speeds = self._profile(choice.samples), self.drafts.speeds(choice)
        return least_in_order(profile, layer_works(profile, True), plain, self._followed(plain), speeds, room)

    def _followed(self, plain: Schedule) -> list[int]:
        if id(plain) not in self._at_once:
            self._at_once[id(plain)] = plain, followed_at_once(plain)
        return self._at_once[id(plain)][1]

    def _room(self, choice: Choice) -> Limits | None:
        limits = [math.inf if limit is None else float(limit) for limit in self.drafts.limits(choice)]
        return None if math.inf in limits else Limits(tuple(limits), self.drafts.shards(choice), self.drafts.slack)

    def on(self, machine: Sequence[int], minibatch: int) -> float:
        """What no plan on these devices can be below: all of them busy all the time."""
        speeds = sum(self.drafts.devices[number].speed for number in machine)
        return self._least_work(minibatch, len(machine) > 1) / speeds

    def _all_work(self, minibatch: int, together: bool) -> float:
        """Of a minibatch at speed 1, in microbatches of the size that takes least."""
        sizes = {samples for _, samples in microbatches(Mesh(1, 1), minibatch)}
        return min(self._bounds(samples).work(together) * minibatch / samples for samples in sizes)

    def estimate(self, choice: Choice) -> float:
        """About what it takes."""
        drafts, totals = self.drafts, self._totals(choice.samples, self.drafts.shards(choice))
        profile, speeds, limits = drafts.profile(choice.samples), drafts.speeds(choice), drafts.limits(choice)
        return estimated(profile, totals, choice, speeds, limits, drafts.slack)


def _least_slower(contention: Contention, choice: Choice) -> float:
    """How many times as long the actions of a pipeline take, at the least."""
    if choice.mesh.num_devices == 1:
        return 1.0
    return min(1.0, contention.forward, contention.backward, contention.halves)
