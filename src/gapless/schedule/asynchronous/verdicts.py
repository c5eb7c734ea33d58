"""Where a device must know whether the update before stands: the optimizer's step that does not wait.

A device steps its weights once its own gradients are there, and goes on with forwards of the next minibatch. Whether
the step was right (was it to be clipped, were all gradients finite?) all devices know together later, at its `V`:

    0: ... 0W2 0U0 0F3 0F4 0F5 0V1 0B3 ...      0V1 waits for 0U0 and 1U0
    1: ... 1W1 1W2 1U0 1F3 1V1 1B3 ...

If not, all steps are redone, and what stands between U and V is thrown away and run again. That a device always goes as
far as its V, and no further, is what makes both outcomes free of deadlock:

    it stands     V needs actions of the minibatch before alone: all of one minibatch, then all of the next is an order
    it does not   forwards before a V need only forwards that are before the V of their device, so all come to theirs;
                  what was sent and not taken is known by number, and after it a minibatch runs as if it were alone
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.dependencies import dependencies
from gapless.schedule.routes import Channel, Routes
from gapless.schedule.violation import Violation


def warm_ups(schedule: Schedule) -> list[int]:
    """Of one minibatch: how many forwards at the start of each row may run before the verdict."""
    ahead = [next((i for i, a in enumerate(row) if a.kind is not Kind.FORWARD), len(row)) for row in schedule.rows]
    early = {action for row, count in zip(schedule.rows, ahead, strict=True) for action in row[:count]}
    while True:
        for device, row in enumerate(schedule.rows):
            cut = next((i for i in range(ahead[device]) if not early.issuperset(dependencies(row[i], schedule))), None)
            if cut is not None:
                early.difference_update(row[cut : ahead[device]])
                ahead[device] = cut
                break
        else:
            return ahead


def misplaced_verdicts(schedule: Schedule) -> Iterator[Violation]:
    """A device has one for each minibatch after the first, before its backwards, and what comes before it can be run
    again.
    """
    per_minibatch = max(1, schedule.num_microbatches // schedule.num_minibatches)
    early, forwards = set(), []
    for device, row in enumerate(schedule.rows):
        judged = updated = 0  # minibatches whose updates stand; that were updated
        for position, action in enumerate(row):
            minibatch = action.microbatch // per_minibatch
            if action.kind is Kind.VERDICT:
                if action.microbatch != judged + 1:
                    yield Violation("order", device, position, f"{action} comes where verdict {judged + 1} is due")
                judged = action.microbatch
            elif action.kind is Kind.UPDATE:
                updated = max(updated, action.microbatch + 1)
            elif action.kind is not Kind.FORWARD and minibatch > judged:
                message = f"{action} comes before the verdict on the update that it builds on, V{judged + 1}"
                yield Violation("order", device, position, message)
            elif action.kind is Kind.FORWARD and minibatch > judged:
                early.add(action)
                forwards.append((device, position, action))
    for device, position, action in forwards:
        late = next((need for need in dependencies(action, schedule) if need not in early), None)
        if late is not None:
            message = f"{action} comes before its verdict and needs {late}, which comes after that of its device"
            yield Violation("order", device, position, message)


def losses_at(row: Iterable[Action], last_stage: int) -> Action | None:
    """After which action of a minibatch its losses are known, and will not be computed again; None if elsewhere."""
    actions = list(row)
    last = [action for action in actions if action.kind is Kind.FORWARD and action.stage == last_stage]
    found = [action for action in actions if action.kind is Kind.VERDICT or action in last[-1:]]
    return found[-1] if last else None


def messages_ahead(schedule: Schedule, device: int) -> dict[Channel, tuple[int, int]]:
    """Of one minibatch with verdicts: how many messages are sent to a device before those, and how many it takes."""
    routes, counts = Routes(schedule.placement), dict[Channel, tuple[int, int]]()
    for row in schedule.rows:
        for forward in takewhile(lambda action: action.kind is not Kind.VERDICT, row):
            for route, came in zip(routes.both(forward), (1, 0), strict=True):
                if route is not None and route.crosses and route.channel[1] == device:
                    sent, taken = counts.get(route.channel, (0, 0))
                    counts[route.channel] = (sent + 1 - came, taken + came)
    return counts
