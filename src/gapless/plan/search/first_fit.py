"""The least number of equal devices on which a model fits."""

import math
from dataclasses import replace

from gapless.errors import PlanError
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Profile
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions

_MOST = 1024  # devices
_SECONDS = 5.0  # for each number


def first_fit(profile: Profile, memory: int, wanted: SearchOptions, minibatch: int) -> int | None:
    """By 1f1b with the smallest microbatches, as one pipeline, recomputed where that helps; None if there is none."""
    wanted = replace(wanted, schedules=("1f1b",), microbatches=minibatch, replicas=False, time_limit=_SECONDS)
    least = sum(layer.kept() for layer in profile.layers) / memory
    for count in range(max(1, math.ceil(least)), min(_MOST, len(profile.layers)) + 1):
        try:
            search(profile, [Device(memory)] * count, wanted, minibatch)
        except PlanError:
            continue
        return count
    return None
