"""Which pipelines, which schedule, how many microbatches, what to recompute: all of it tried, judged by the simulator
under the memory limit, and told.

The answer does not depend on chance, nor on the clock unless the time limit cuts the search short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from gapless.errors import ConfigError, PlanError
from gapless.plan.explain import explained
from gapless.plan.plan import Plan, Searched
from gapless.plan.profile.machine import Device, check_devices, check_host, check_layers, check_reach
from gapless.plan.profile.profile import Profile
from gapless.plan.search.attempts import Attempts, Rejection
from gapless.plan.search.choices import Choice
from gapless.plan.search.drafts import Drafts
from gapless.plan.search.search_options import ANYTHING, Offload, SearchOptions
from gapless.units import show_bytes, show_count

_LESS: dict[Offload, Offload] = {"activations": "none", "both": "optimizer"}


@dataclass(frozen=True)
class Found:
    """All plans, the quickest first; what was rejected; why the first is the first; and how far was searched."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    explanation: str
    searched: Searched

    @property
    def best(self) -> Plan:
        return self.plans[0]

    @property
    def complete(self) -> bool:
        return self.searched.complete


def search(
    profile: Profile,
    devices: int | Sequence[Device],
    wanted: SearchOptions = ANYTHING,
    minibatch: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Found:
    """The best plan for a profile on these devices, or on some of them.

    minibatch  samples in a step; by default the profile's, or 4 of its microbatches per device
    """
    there = [Device()] * _at_least_one("devices", devices) if isinstance(devices, int) else list(devices)
    check_devices(there)
    if minibatch is None:
        minibatch = profile.minibatch or 4 * len(there) * profile.samples
    _at_least_one("minibatch", minibatch)
    if wanted.microbatches is not None and _at_least_one("microbatches", wanted.microbatches) > minibatch:
        raise ConfigError(
            f"a minibatch of {show_count(minibatch, 'sample')} can't be cut into "
            f"{show_count(wanted.microbatches, 'microbatch')}: use fewer"
        )
    check_reach(profile, len(there))
    check_host(profile, wanted.offload)
    check_layers(Drafts(profile, there, wanted).profile(profile.samples), there)
    rounds = [wanted]
    if wanted.offload in _LESS:  # without it first: then it never makes a plan slower, and little is left to try
        half = None if wanted.time_limit is None else wanted.time_limit / 2
        rounds = [replace(wanted, offload=word, time_limit=half) for word in (_LESS[wanted.offload], wanted.offload)]
    found: list[tuple[Choice, Plan]] = []
    for asked in rounds:
        tries = Attempts(Drafts(profile, there, asked, minibatch), asked, minibatch, progress, found)
        tries.try_all()
        found = tries.found
    if not tries.found:
        tries.try_nearest()
        raise PlanError(_why_none(tries, there, minibatch))
    ranked = [plan for _, plan in tries.ranked()]
    searched = tries.searched(len(there))
    plans = (replace(ranked[0], searched=searched), *ranked[1:])
    return Found(plans, tuple(tries.rejected), explained(plans, len(tries.rejected)), searched)


def _why_none(tries: Attempts, devices: Sequence[Device], minibatch: int) -> str:
    cut_short = f" (cut short by the time limit of {tries.time_limit:g} s)" if tries.cut_short else ""
    if tries.missed:
        excess, (choice, reason) = min(tries.missed, key=itemgetter(0))
        most = max(device.memory or 0 for device in devices)
        return (
            f"nothing fits {show_bytes(most)} per device{cut_short}; the nearest is {choice}, where {reason}: about "
            f"{show_bytes(excess * most)} per device would do"
        )
    if tries.rejected:
        return f"no plan can be made: {tries.rejected[0].choice} is rejected because {tries.rejected[0].reason}"
    return (
        f"a minibatch of {show_count(minibatch, 'sample')} can't be shared out evenly among "
        f"{show_count(len(devices), 'device')} as asked: use "
        f"{minibatch // len(devices) * len(devices) or len(devices)}, or another number of microbatches"
    )


def _at_least_one(word: str, value: int) -> int:
    if isinstance(value, bool) or value < 1:
        raise ConfigError(f"{word} is {value}, but a plan needs at least 1")
    return value
