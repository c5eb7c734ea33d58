"""What a choice takes where the order of its actions is known, and with it how many microbatches each device holds.

    0: F F F F B ...        device 0 holds four microbatches of its layers when its first backward begins, device 3 one
    3: F B F B ...

Where memory is short, layers are recomputed, or others have more of them. So a device has place for so many layers in
so much time; and all of them must have a place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gapless.plan.profile.profile import Profile
from gapless.plan.search.bounds.least_work import ROUNDING, LeastWork, Limits, alike, entry_work
from gapless.schedule.action import BACKWARDS, Kind, Schedule

_STEPS = 40  # of a bisection


@dataclass(frozen=True)
class _Place:
    """A device: seconds that it has no time for layers, at speed 1, its speed and bytes, how many microbatches of each
    of its stages it holds at the least, and how often these are recomputed.
    """

    taken: float
    speed: float
    room: float
    held: int
    times: int


def least_in_order(
    profile: Profile,
    works: Sequence[LeastWork],
    schedule: Schedule,
    at_once: Sequence[int],
    speeds: Sequence[float],
    room: Limits,
) -> float:
    """What no plan with this order can be below. It counts the layers that are alike; of others only the first and the
    last are known to be somewhere. `at_once`: per stage how many backwards come right behind their forwards.
    """
    M, placement = schedule.num_microbatches, schedule.placement
    each, group = alike([work.all for work in works])
    layers = [layer for layer, like in zip(profile.layers, group, strict=True) if like]
    slower = min(1.0, profile.contention.forward)
    again = slower * min(layer.recompute.median for layer in layers)
    kept = min(layer.kept(room.shards) for layer in layers)
    size = (1 + room.slack) * min(layer.held for layer in layers)
    entry = entry_work(profile, alone=False)
    places = []
    for device, own in enumerate(placement.stages):
        ends = {own_end for own_end, stage in ((0, 0), (len(works) - 1, placement.num_stages - 1)) if stage in own}
        taken = sum(works[number].all for number in ends if not group[number]) + len(own) * entry.all
        ahead = dict.fromkeys(own, 0)
        for action in schedule.rows[device]:
            if action.kind in BACKWARDS:
                break
            ahead[action.stage] += action.kind is Kind.FORWARD
        times = min(M - at_once[stage] for stage in own)
        free = room.each[device] - profile.reserved
        places.append(_Place(M * taken, speeds[device], free, min(ahead.values()), times))

    def number(place: _Place, seconds: float) -> int:
        """Of layers, at the most."""
        there = seconds * place.speed - place.taken
        found = min(len(layers), int(there / (M * each) + ROUNDING)) if each else len(layers)
        while found > 0:
            left, one = place.room - found * kept, place.held * size
            remade = max(0.0, found - left / one) if one else 0.0
            if left >= 0 and M * found * each + place.times * remade * again <= there * (1 + ROUNDING):
                return found
            found -= 1
        return 0

    def fits(seconds: float) -> bool:
        return sum(number(place, seconds) for place in places) >= len(layers)

    low, high = 0.0, 2 * sum(M * (work.all + again + 2 * entry.all) for work in works) / min(speeds)
    if not fits(high):
        return 0.0  # whoever tries it says why
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low * (1 - ROUNDING)


def followed_at_once(schedule: Schedule) -> list[int]:
    """Per stage how many backwards come right behind their forwards: these are never recomputed."""
    found = [0] * schedule.num_stages
    for row in schedule.rows:
        for before, action in pairwise(row):
            same = before.kind is Kind.FORWARD and action[::2] == before[::2]
            found[action.stage] += same and action.kind in BACKWARDS
    return found
