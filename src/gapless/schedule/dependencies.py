"""The one rule of what an action depends on. Verifier, simulator, lowering, executor and viewer all go by it.

    F(s)  needs  F(s-1)            the activation of the stage before
    I(s)  needs  F(s), I(s+1)      its own forward, and the gradient of the stage after (the last stage has none)
                 R(s)              if the schedule recomputes: R itself needs its own F alone, not the gradient
                 L(s)              if its activations went to the host: L needs O(s), O needs F(s), R needs L(s)
    W(s)  needs  I(s)
    B(s)  is     I(s) and W(s) in one
    U(s)  needs  every W(s) of its minibatch
    V(s)  needs  every U of the minibatch before, of all stages

all for the same microbatch. Where transfers are written out, the activation comes through SEND_F(s-1) and RECV_F(s),
the gradient through SEND_B(s+1) and RECV_B(s); a receive is posted and does not wait, so it needs nothing.
"""

from collections import deque
from collections.abc import Iterator

from gapless.errors import ScheduleError
from gapless.schedule.action import OPTIONAL, PER_MINIBATCH, Action, Kind, Schedule
from gapless.units import show_count

_F, _I, _W, _R = Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE

_RULE: dict[Kind, tuple[tuple[int, Kind], ...]] = {
    Kind.FORWARD: ((-1, _F), (-1, Kind.SEND_ACTIVATION), (0, Kind.RECEIVE_ACTIVATION)),
    Kind.INPUT_GRAD: ((0, _F), (0, _R), (0, Kind.LOAD), (1, _I), (1, Kind.SEND_GRADIENT), (0, Kind.RECEIVE_GRADIENT)),
    Kind.WEIGHT_GRAD: ((0, _I),),
    Kind.RECOMPUTE: ((0, _F), (0, Kind.LOAD)),
    Kind.OFFLOAD: ((0, _F),),
    Kind.LOAD: ((0, Kind.OFFLOAD),),
    Kind.SEND_ACTIVATION: ((0, _F),),
    Kind.SEND_GRADIENT: ((0, _I),),
    Kind.RECEIVE_ACTIVATION: (),
    Kind.RECEIVE_GRADIENT: (),
}
_RULE[Kind.BACKWARD] = _RULE[Kind.INPUT_GRAD]
_RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
_COMPLETES = {kind: (kind,) for kind in Kind} | {Kind.BACKWARD: (_I, _W)}


def completes(action: Action) -> tuple[Action, ...]:
    """What is there once `action` has ended: a B stands for its I and its W, everything else for itself."""
    stage, kind, microbatch = action
    return tuple(Action(stage, done, microbatch) for done in _COMPLETES[kind])


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """What must be there before `action` may start, in terms of what `completes` returns."""
    stage, kind, microbatch = action
    if kind is Kind.UPDATE:
        return tuple(Action(stage, _W, m) for m in microbatches_of(microbatch, schedule))
    if kind is Kind.VERDICT:
        return tuple(Action(s, Kind.UPDATE, microbatch - 1) for s in range(schedule.num_stages if microbatch else 0))
    needs = (
        Action(stage + step, need, microbatch) for step, need in _RULE[kind] if 0 <= stage + step < schedule.num_stages
    )
    return tuple(need for need in needs if need.kind not in OPTIONAL or need in schedule.optional)


def microbatches_of(minibatch: int, schedule: Schedule) -> range:
    """Those whose gradients an update of this number takes."""
    per_minibatch = schedule.num_microbatches // schedule.num_minibatches
    return range(minibatch * per_minibatch, (minibatch + 1) * per_minibatch)


class DeadlockError(ScheduleError):
    """No device can go on. `blocked` tells per device where it stands, before which action, and what that waits for."""

    def __init__(self, blocked: dict[int, tuple[int, Action, Action]]) -> None:
        self.blocked = blocked
        waits = [
            f"device {device} stands before {action} and waits for {need}"
            for device, (_, action, need) in blocked.items()
        ]
        more = f", and {len(waits) - 4} more" if len(waits) > 4 else ""
        super().__init__(f"the schedule can't be run to its end: {'; '.join(waits[:4])}{more}")


_MOST_HOLES = 100_000


def refuse_holes(schedule: Schedule) -> None:
    """A few actions with large numbers would make a table of every stage and microbatch that fills the memory."""
    S, M = schedule.num_stages, max(schedule.num_microbatches, schedule.num_minibatches)
    if schedule.num_actions + _MOST_HOLES < S * M:
        raise ScheduleError(
            f"the schedule has {show_count(schedule.num_actions, 'action')} for {show_count(S, 'stage')} and "
            f"{show_count(M, 'microbatch')}, but every stage runs every microbatch: at least {S * M:,} forwards"
        )


class Milestones:
    """Every (kind, stage, microbatch) as a number, so that what is done of millions of them fits into a flat list.

    The number is a base, which `needs` and `gives` hold per kind and stage, plus the microbatch.
    """

    def __init__(self, schedule: Schedule) -> None:
        refuse_holes(schedule)
        self.schedule = schedule
        self.num_microbatches = max(schedule.num_microbatches, schedule.num_minibatches)
        stages = schedule.num_stages
        # Receives last.
        kinds = sorted((kind for kind in Kind if kind is not Kind.BACKWARD), key=_RECEIVES.__contains__)
        self._bases: dict[Kind, int] = {kind: i * stages * self.num_microbatches for i, kind in enumerate(kinds)}
        self.first_receive = self._bases[kinds[-len(_RECEIVES)]]
        self.size = len(kinds) * stages * self.num_microbatches
        present = schedule.kinds
        self.gives = {
            kind: [tuple(self._base(stage, done) for done in _COMPLETES[kind]) for stage in range(stages)]
            for kind in Kind
        }
        self.needs = {
            kind: [
                tuple(
                    self._base(stage + step, need)
                    for step, need in rule
                    if 0 <= stage + step < stages and (need not in OPTIONAL or need in present)
                )
                for stage in range(stages)
            ]
            for kind, rule in _RULE.items()
        }

    def _base(self, stage: int, kind: Kind) -> int:
        return self._bases[kind] + stage * self.num_microbatches

    def update_needs(self, stage: int, minibatch: int) -> tuple[int, ...]:
        return tuple(self._base(stage, _W) + m - minibatch for m in microbatches_of(minibatch, self.schedule))

    def needs_of(self, action: Action) -> tuple[int, ...]:
        """Bases: the numbers of the milestones are these plus the action's microbatch."""
        stage, kind, number = action
        if kind is Kind.VERDICT:
            return tuple(self._base(s, Kind.UPDATE) - 1 for s in range(self.schedule.num_stages if number else 0))
        return self.update_needs(stage, number) if kind is Kind.UPDATE else self.needs[kind][stage]

    def action(self, number: int) -> Action:
        kind = next(kind for kind, base in reversed(self._bases.items()) if number >= base)
        stage, microbatch = divmod(number - self._bases[kind], self.num_microbatches)
        return Action(stage, kind, microbatch)

    def nothing_done(self) -> bytearray:
        """One flag per milestone. What a schedule may leave out and does counts as there from the start."""
        done = bytearray(self.size)
        for kind in OPTIONAL & self.schedule.kinds:
            base = self._bases[kind]
            length = self.schedule.num_stages * self.num_microbatches
            done[base : base + length] = b"\1" * length
        for stage, kind, microbatch in self.schedule.optional:
            done[self._base(stage, kind) + microbatch] = 0
        return done


Step = tuple[int, Action, tuple[int, ...], tuple[int, ...]]


def replay(schedule: Schedule, milestones: Milestones | None = None) -> Iterator[Step]:
    """Yield (device, action, needs, gives) in an order in which the devices could run; raise DeadlockError if they
    can't.

    `needs` and `gives` are bases: the numbers of the milestones are these plus the action's microbatch.
    """
    milestones = milestones or Milestones(schedule)
    needs_of, gives_of = milestones.needs, milestones.gives
    done = milestones.nothing_done()
    rows = schedule.rows
    waiting: dict[int, list[int]] = {}
    position = [0] * len(rows)
    runnable = deque(range(len(rows)))
    while runnable:
        device = runnable.popleft()
        row = rows[device]
        for at in range(position[device], len(row)):
            action = row[at]
            stage, kind, microbatch = action
            needs = needs_of[kind][stage] if kind not in PER_MINIBATCH else milestones.needs_of(action)
            for base in needs:
                if not done[base + microbatch]:
                    waiting.setdefault(base + microbatch, []).append(device)
                    break
            else:
                gives = gives_of[kind][stage]
                yield device, action, needs, gives
                for base in gives:
                    done[base + microbatch] = 1
                    if base + microbatch in waiting:
                        runnable.extend(waiting.pop(base + microbatch))
                continue
            position[device] = at
            break
    blocked = {}
    for number, devices in waiting.items():
        for device in devices:
            at = position[device]
            blocked[device] = (at, rows[device][at], milestones.action(number))
    if blocked:
        raise DeadlockError(dict(sorted(blocked.items())))
