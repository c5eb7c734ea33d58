"""Activations that leave for the host's memory after F, by an O, and come back by an L before they are needed."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import add

from gapless.schedule.action import BACKWARDS, COPIES, Action, Kind, Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.host_copies import sizes
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline

_PAYS = 3  # times as long as both copies must the wait be


def add_offload(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    stages: Collection[int] | None = None,
    memory_limit: Number | None = None,
) -> Schedule:
    """Sends activations to the host's memory while nobody needs them, those that wait longest first. With a
    `memory_limit` per device no more than it takes to stay below, and without one all that gain. Nothing leaves that
    would have to be waited for, so the schedule takes no longer; whether the limit is met, its peak tells.
    """
    timeline = simulate(schedule, costs)
    limits = None if memory_limit is None else [memory_limit] * schedule.num_devices
    return relieved(timeline, limits, stages=stages)


def relieved(
    timeline: Timeline,
    limits: Sequence[Number] | None,
    held: Sequence[Sequence[Number]] | None = None,
    *,
    stages: Collection[int] | None = None,
    host_memory: Number | None = None,
) -> Schedule:
    """As `add_offload`, with a limit for each device.

    held         what each device holds while each of its actions runs; unless given what their costs say
    host_memory  the most that may be there at once of all devices on one link
    """
    schedule, costs = timeline.schedule, timeline.costs
    if schedule.has_copies or schedule.kinds.isdisjoint(BACKWARDS):
        return schedule
    wanted = range(schedule.num_stages) if stages is None else stages
    found = [each for each in _stays(timeline, costs) if each.stage in wanted]
    chosen: list[_Stay] = []
    for _, group in groupby(found, lambda stay: stay.device // int(costs.host_share)):
        link = _Link(timeline, host_memory)
        stays = sorted(group, key=lambda stay: stay.wait, reverse=True)
        if limits is None:
            for stay in stays:
                link.try_to_add(stay)
        else:
            for device in sorted({stay.device for stay in stays if stay.size}):
                own = [each for each in stays if each.device == device and each.size]
                levels = [level for level, _ in timeline.memory[device]] if held is None else held[device]
                _relieve(link, own, timeline, levels, limits[device])
        chosen += link.chosen
    return schedule.with_rows(_with_copies(schedule, device, chosen) for device in range(schedule.num_devices))


def ended_copies(schedule: Schedule, costs: Costs | None, device: int) -> list[list[Action]]:
    """For each action of a device, the copies out that end before it and not before an earlier one, as simulated. Where
    nothing is known of the link, a copy is taken to last as long as the computation behind it.
    """
    timeline = simulate(schedule, costs)
    spans = list(timeline.spans(device))
    found: list[list[Action]] = [[] for _ in spans]
    for place, (copy, _, end) in enumerate(spans):
        if copy.kind is Kind.OFFLOAD:
            behind, back = spans[place + 1 :], copy._replace(kind=Kind.LOAD)
            if timeline.costs.host_bandwidth is None:
                end = next(last for action, _, last in behind if action.kind not in COPIES)
            waits = (number for number, (action, start, _) in enumerate(behind) if start >= end or action == back)
            found[place + 1 + next(waits)].append(copy)
    return found


@dataclass(eq=False)
class _Stay:
    """What a stage keeps of a microbatch, which may wait in the host's memory."""

    device: int
    stage: int
    microbatch: int
    made: Number  # when F ends
    needed: Number  # when the backward, or the recompute, starts
    place: int  # of that one in its row
    size: Number
    copy: Number  # the time of a copy
    # As things stand on its link:
    out: Number = 0  # when its O has ended
    back: Number = 0  # when its L starts
    issued: int = 0  # the place in the row before which its L stands

    @property
    def wait(self) -> Number:
        return self.needed - self.made


def _stays(timeline: Timeline, costs: Costs) -> Iterable[_Stay]:
    """Those that gain, device by device."""
    schedule = timeline.schedule
    size = sizes(schedule, costs)
    for device in range(schedule.num_devices):
        made: dict[tuple[int, int], Number] = {}
        for place, (action, start, end) in enumerate(timeline.spans(device)):
            key = action.stage, action.microbatch
            if action.kind is Kind.FORWARD:
                made[key] = end
            elif (action.kind in BACKWARDS or action.kind is Kind.RECOMPUTE) and key in made:
                moved = size(action)
                copy = costs.copy_time(moved)
                stay = _Stay(device, *key, made.pop(key), start, place, moved, copy)
                if stay.wait > _PAYS * 2 * copy:
                    yield stay


class _Link:
    """One to the host, and the stays that go through it."""

    def __init__(self, timeline: Timeline, host_memory: Number | None) -> None:
        self._ends, self._host_memory = timeline.ends, host_memory
        self.chosen: list[_Stay] = []

    def try_to_add(self, stay: _Stay) -> bool:
        """Unless something would come back too late."""
        self.chosen.append(stay)
        if self._planned():
            return True
        self.remove(stay)
        return False

    def remove(self, stay: _Stay) -> None:
        self.chosen.remove(stay)
        self._planned()

    def _planned(self) -> bool:
        """When all copies run: out as soon as they can, back as late as they may. False where that is too late."""
        free: Number = 0
        for stay in sorted(self.chosen, key=lambda stay: (stay.made, stay.device)):
            stay.out = free = max(free, stay.made) + stay.copy
        latest: Number | None = None
        for stay in sorted(self.chosen, key=lambda stay: (stay.needed, stay.device), reverse=True):
            latest = (stay.needed if latest is None else min(stay.needed, latest)) - stay.copy
            if latest < stay.out:
                return False
            stay.issued = min(stay.place, bisect_right(self._ends[stay.device], latest))
        free = 0
        issued = sorted(self.chosen, key=lambda stay: (self._when(stay), stay.device, stay.needed))
        for stay in issued:
            stay.back = max(free, self._when(stay), stay.out)
            free = stay.back + stay.copy
            if free > stay.needed:
                return False
        return self._host_memory is None or self._on_host() <= self._host_memory

    def _on_host(self) -> Number:
        """The most that is there at once: of a stay from when its O starts until its L has ended."""
        starts = ((stay.out - stay.copy, stay.size) for stay in self.chosen)
        ends = ((stay.back + stay.copy, -stay.size) for stay in self.chosen)
        return max(accumulate(change for _, change in sorted((*starts, *ends))), default=0)

    def _when(self, stay: _Stay) -> Number:
        """When the device gets to its L."""
        return self._ends[stay.device][stay.issued - 1]


def _relieve(link: _Link, stays: list[_Stay], timeline: Timeline, held: Sequence[Number], limit: Number) -> None:
    """As few of a device's as bring what it holds below the limit; where no few do, all that gain. What leaves counts
    until its copy has ended when the device gets to an action, and what comes back from its L on.
    """
    ends = timeline.ends[stays[0].device]
    reached = (0, *ends[:-1])  # when the device gets to each action

    def left(away: Iterable[tuple[_Stay, Number, int]]) -> list[Number]:
        """What is held while each action runs, if these are away from then until that action."""
        changes: list[Number] = [0] * (len(held) + 1)
        for stay, out, until in away:
            if (first := bisect_left(reached, out)) < until:
                changes[first] -= stay.size
                changes[until] += stay.size
        return list(map(add, held, accumulate(changes)))

    at_best = ((stay, stay.made + stay.copy, bisect_right(ends, stay.needed - stay.copy)) for stay in stays)
    possible = max(left(at_best)) <= limit
    while True:
        out = {stay for stay in link.chosen if stay.device == stays[0].device}
        now = left((stay, stay.out, stay.issued) for stay in out)
        most = max(now)
        if most <= limit:
            return
        worst = now.index(most)
        for stay in stays if possible else ():
            early = stay.made + stay.copy <= reached[worst] and worst < stay.place
            if early and stay not in out and link.try_to_add(stay):
                if stay.out <= reached[worst] and worst < stay.issued:
                    break
                link.remove(stay)
        else:
            for stay in stays:
                if stay not in out:
                    link.try_to_add(stay)
            return


def _with_copies(schedule: Schedule, device: int, chosen: list[_Stay]) -> list[Action]:
    before: dict[int, list[_Stay]] = defaultdict(list)
    out = set()
    for stay in chosen:
        if stay.device == device:
            before[stay.issued].append(stay)
            out.add((stay.stage, stay.microbatch))
    row = []
    for place, action in enumerate(schedule.rows[device]):
        loads = sorted(before[place], key=lambda stay: stay.needed)
        row += [Action(stay.stage, Kind.LOAD, stay.microbatch) for stay in loads]
        row.append(action)
        if action.kind is Kind.FORWARD and (action.stage, action.microbatch) in out:
            row.append(Action(action.stage, Kind.OFFLOAD, action.microbatch))
    return row
