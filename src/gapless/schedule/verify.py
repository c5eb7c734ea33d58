"""Is this a schedule that can be run? Every violation at once, each with its place; and the proof that nothing can
hang: it runs to its end with endless buffers, and so with those of `pools`.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from gapless.errors import ScheduleError
from gapless.schedule.action import BACKWARDS, COPIES, TRANSFERS, Action, Kind, Schedule, check_schedule
from gapless.schedule.asynchronous.updates import WEIGHT_GRADIENTS, lacking, missing_updates, updates_out_of_order
from gapless.schedule.asynchronous.verdicts import misplaced_verdicts
from gapless.schedule.asynchronous.weights import unmade_versions
from gapless.schedule.dependencies import DeadlockError, completes, dependencies, refuse_holes, replay
from gapless.schedule.pools import most_unsent, receive_buffers
from gapless.schedule.routes import Channel, messages, transfer
from gapless.schedule.violation import Violation, excerpt
from gapless.units import show_count


@dataclass(frozen=True)
class Report:
    """What `verify` found. `warnings` do not keep a schedule from running; `buffers` is p per channel."""

    schedule: Schedule
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...] = ()
    buffers: dict[Channel, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.violations

    @cached_property
    def unsent(self) -> dict[Channel, int]:
        """The most messages of each channel that wait for a receive, in any run with these buffers."""
        return most_unsent(self.schedule) if self.ok else {}

    @property
    def in_order(self) -> bool:
        """Does every stage make its gradients in microbatch order, in which they are added? Others wait in memory."""
        return not self.warnings

    def raise_if_wrong(self) -> None:
        if self.ok:
            return
        shown = "\n".join(
            f"  {violation.message}\n{excerpt(self.schedule, violation)}" for violation in self.violations[:3]
        )
        more = f"\n  and {len(self.violations) - 3} more" if len(self.violations) > 3 else ""
        count = f"{len(self.violations)} violation{'s' if len(self.violations) > 1 else ''}"
        raise ScheduleError(f"schedule {self.schedule.name or 'given'} has {count}:\n{shown}{more}")


def verify(schedule: Schedule, num_microbatches: int | None = None, num_stages: int | None = None) -> Report:
    """Checks that a schedule is complete, in order and possible, and proves that it is deadlock-free. Returns a Report
    with all violations at once; `report.ok` is True if there are none.

    num_microbatches  how many there should be, if you know
    num_stages        the same for stages
    """
    check_schedule(schedule, "verify")
    _refuse_strangers(schedule)
    refuse_holes(schedule)
    places, violations = _places(schedule)
    violations += _incomplete(schedule, places, num_microbatches, num_stages)
    if Kind.UPDATE in schedule.kinds:
        violations += [*missing_updates(schedule, places), *updates_out_of_order(schedule), *unmade_versions(schedule)]
    violations += _unpaired(schedule, places)
    if Kind.VERDICT in schedule.kinds:
        violations += misplaced_verdicts(schedule)
    violations += _out_of_place(schedule, places)
    violations += _not_transferred(schedule, places)
    violations += _stuck(schedule, places)
    buffers = {} if violations else receive_buffers(schedule)
    violations.sort(key=lambda violation: (violation.device, violation.position))
    return Report(schedule, tuple(violations), tuple(_unordered_backwards(schedule)), buffers)


def _refuse_strangers(schedule: Schedule) -> None:
    """Rows that were put together with another schedule's placement: nothing can be said about their places."""
    placement = schedule.placement
    if schedule.num_devices != placement.num_devices:
        raise ScheduleError(
            f"the schedule has rows for {show_count(schedule.num_devices, 'device')}, but its placement is for "
            f"{placement.num_devices}: give the placement of these rows, or none"
        )
    stranger = next((a for a in schedule.actions if not 0 <= a.stage < placement.num_stages), None)
    if stranger is not None:
        raise ScheduleError(
            f"the schedule has {stranger}, but its placement is for stages 0 to {placement.num_stages - 1}: give the "
            "placement of these rows, or none"
        )


def _places(schedule: Schedule) -> tuple[dict[Action, tuple[int, int]], list[Violation]]:
    """Where each action is; what is there twice."""
    places: dict[Action, tuple[int, int]] = {}
    twice = []
    for device, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if places.setdefault(action, (device, position)) != (device, position):
                other = places[action][0]
                where = f"on device {device}" if other == device else f"on devices {other} and {device}"
                message = f"{action} occurs twice {where}"
                twice.append(Violation("complete", device, position, message))
    return places, twice


_BITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 4, Kind.WEIGHT_GRAD: 8}


def _incomplete(
    schedule: Schedule, places: dict[Action, tuple[int, int]], num_microbatches: int | None, num_stages: int | None
) -> Iterator[Violation]:
    """Every stage runs every microbatch: F, and B or both I and W (no backward at all is a schedule for inference)."""
    M = max(schedule.num_microbatches, num_microbatches or 0)
    S = max(schedule.num_stages, num_stages or 0)
    there = bytearray(S * M)
    for stage, kind, microbatch in schedule.actions:
        if kind in _BITS:
            there[stage * M + microbatch] |= _BITS[kind]
    if schedule.kinds.isdisjoint({Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}):
        there = bytearray(found | 2 for found in there)
        for action, place in places.items():
            if action.kind is Kind.RECOMPUTE or action.kind in COPIES:
                yield Violation("complete", *place, f"{action} is for no backward: the schedule has none")
    for index, bits in enumerate(there):
        wanted = 1 | 4 | 8 if bits & (4 | 8) else 1 | 2  # F, I and W, or F and B
        if bits == wanted:
            continue
        stage, microbatch = divmod(index, M)
        device = schedule.placement.device(stage, microbatch) if stage < schedule.num_stages else 0
        wrong = [f"{stage}{kind}{microbatch} is missing" for kind, bit in _BITS.items() if wanted & bit & ~bits]
        if bits & ~wanted:
            wrong = [
                f"{stage}B{microbatch} is the whole backward, without I or W beside it (zero bubble's B is I here)"
            ]
        yield from (Violation("complete", device, len(schedule.rows[device]), message) for message in wrong)


def _unpaired(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> Iterator[Violation]:
    """What goes to the host comes back, and nothing else does."""
    for action in schedule.optional:
        if action.kind in COPIES:
            out = action.kind is Kind.OFFLOAD
            other = action._replace(kind=Kind.LOAD if out else Kind.OFFLOAD)
            if other not in places:
                reason = "its activations never come back" if out else "nothing went to the host before"
                yield Violation("complete", *places[action], f"{action} is without its {other}: {reason}")


def _not_transferred(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> Iterator[Violation]:
    """Where transfers are written out, all are: what crosses has its SEND and its RECV, both in the same order, and
    nothing else has.
    """
    if not schedule.has_transfers:
        return
    wanted: set[Action] = set()
    for channel, numbers in messages(schedule)[0].items():
        source, target, name = channel
        pairs = []
        for message in numbers:
            pair = transfer(channel, message)
            wanted.update(pair)
            for device, action in zip((source, target), pair, strict=True):
                if action not in places:
                    reason = f"{action} is missing: the {name} crosses from device {source} to device {target}"
                    yield Violation("complete", device, len(schedule.rows[device]), reason)
            if places.keys() >= set(pair):
                pairs.append(pair)
        pairs.sort(key=lambda pair: places[pair[0]])
        for (_, first), (_, second) in pairwise(pairs):
            if places[second] < places[first]:
                reason = f"{second} comes before {first}, which device {source} sends first"
                yield Violation("order", *places[second], reason)
    for action in schedule.optional - wanted:
        if action.kind in TRANSFERS:
            yield Violation(
                "complete", *places[action], f"{action} transfers something that does not cross between devices"
            )


def _out_of_place(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> Iterator[Violation]:
    """All actions of a (stage, microbatch) are on one device: that is where its activations are."""
    placement = schedule.placement
    single = placement.single
    for action, (device, position) in places.items():
        stage, kind, microbatch = action
        if single is not None and single[stage] == device:
            continue
        if kind is Kind.UPDATE:
            reason = lacking(device, stage, microbatch, schedule)
        elif (home := placement.device(stage, microbatch)) != device:
            reason = f"but stage {stage} has microbatch {microbatch} on device {home}"
        else:
            continue
        if reason is not None:
            message = f"{action} is on device {device}, {reason}"
            yield Violation("placement", device, position, message)


def _stuck(schedule: Schedule, places: dict[Action, tuple[int, int]]) -> Iterator[Violation]:
    """Where devices wait for each other or for what comes later in their own row."""
    try:
        for _ in replay(schedule):
            pass
    except DeadlockError as deadlock:
        provided = {gift: place for action, place in places.items() for gift in completes(action)}
        for device, (position, action, need) in deadlock.blocked.items():
            if need not in provided:
                reason = f"{need}, which is missing"
            elif provided[need][0] == device:
                reason = f"{need}, which comes later on the same device"
            else:
                other = provided[need][0]
                standing = deadlock.blocked.get(other)
                reason = f"{need} on device {other}, which itself waits before {standing[1]}" if standing else f"{need}"
            yield Violation("dependency", device, position, f"{action} waits for {reason}")
        yield from _local_order(schedule, provided, deadlock)


def _local_order(
    schedule: Schedule, provided: dict[Action, tuple[int, int]], deadlock: DeadlockError
) -> Iterator[Violation]:
    """Beyond where the devices stand: every action that comes before something it needs on its own device."""
    for device, (standing, _, _) in deadlock.blocked.items():
        row = schedule.rows[device]
        for position in range(standing + 1, len(row)):
            for need in dependencies(row[position], schedule):
                place = provided.get(need)
                if place is not None and place[0] == device and place[1] > position:
                    message = f"{row[position]} comes before {need}, which it needs, on the same device"
                    yield Violation("order", device, position, message)


def is_in_order(schedule: Schedule, stage: int, kinds: Collection[Kind]) -> bool:
    """Whether a stage takes its actions of these kinds in microbatch order."""
    rows = ([a.microbatch for a in row if a.stage == stage and a.kind in kinds] for row in schedule.rows)
    return all(numbers == sorted(numbers) for numbers in rows)


def _unordered_backwards(schedule: Schedule) -> Iterator[Violation]:
    """Gradients come in another order than in the plain loop: a pipeline holds them back until their turn."""
    for kinds, letter in ((BACKWARDS, "input"), (WEIGHT_GRADIENTS, "weight")):
        for device, row in enumerate(schedule.rows):
            last: dict[int, int] = {}
            for position, action in enumerate(row):
                if action.kind in kinds:
                    before = last.get(action.stage, -1)
                    if action.microbatch < before:
                        message = (
                            f"{action} comes after microbatch {before}: stage {action.stage} takes {letter} gradients "
                            "out of microbatch order, so gradients wait for their turn, in extra memory"
                        )
                        yield Violation("microbatch order", device, position, message)
                    last[action.stage] = max(before, action.microbatch)
