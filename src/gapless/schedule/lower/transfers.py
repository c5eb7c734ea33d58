"""What crosses between devices, written out as sends and receives."""

from collections import defaultdict

from gapless.schedule.action import Action, Schedule
from gapless.schedule.pools import receive_buffers
from gapless.schedule.routes import Routes, messages, transfer


def add_transfers(schedule: Schedule, spare_buffers: int = 1) -> Schedule:
    """Write out what crosses between devices: a SEND right behind its producer, a RECV as early as the pool has a
    buffer.

    The pool of a channel is what the deadlock proof asks for and `spare_buffers` more, so that receives are posted
    ahead.
    """
    if schedule.has_transfers:
        return schedule
    produced, consumed = messages(schedule)
    pools = receive_buffers(schedule)
    routes = Routes(schedule.placement)
    before: dict[int, list[Action]] = defaultdict(list)  # device -> receives posted at its start
    after: dict[Action, list[Action]] = defaultdict(list)  # by a consumer: the receive that takes over its buffer
    for channel, consumers in consumed.items():
        pool = pools[channel] + spare_buffers
        turn = {message: i for i, (message, _) in enumerate(consumers)}
        last = 0  # the turn by which every message that must be gone has been consumed
        # In the producer's order, whatever the order of the consumers: a channel has no other.
        in_order = list(produced[channel])
        for number, message in enumerate(in_order):
            _, receive = transfer(channel, message)
            if number < pool:
                before[channel[1]].append(receive)
            else:
                last = max(last, turn[in_order[number - pool]])
                after[consumers[last][1]].append(receive)
    rows = []
    for device, row in enumerate(schedule.rows):
        made = list(before[device])
        for action in row:
            made.append(action)
            route = routes.leaving(action)
            if route is not None and route.crosses:
                made.append(transfer(route.channel, (route.source, action.microbatch))[0])
            made += after.get(action, [])
        rows.append(made)
    return schedule.with_rows(rows)
