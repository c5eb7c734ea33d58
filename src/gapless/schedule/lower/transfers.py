"""What crosses between devices, written out as sends and receives."""

from collections import defaultdict

from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.verify import Channel, messages, receive_buffers


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
    before: dict[int, list[Action]] = defaultdict(list)  # device -> receives posted at its start
    after: dict[Action, list[Action]] = defaultdict(list)  # by a consumer: the receive that takes over its buffer
    sends: set[tuple[int, int, str]] = set()
    for channel, numbers in produced.items():
        sends.update((stage, microbatch, channel[2]) for stage, microbatch in numbers)
        _post_receives(channel, numbers, consumed[channel], pools[channel] + spare_buffers, before, after)
    rows = []
    for device, row in enumerate(schedule.rows):
        made = list(before[device])
        for action in row:
            made.append(action)
            stage, kind, microbatch = action
            if kind is Kind.FORWARD and (stage, microbatch, "activation") in sends:
                made.append(Action(stage, Kind.SEND_ACTIVATION, microbatch))
            elif kind in BACKWARDS and (stage, microbatch, "gradient") in sends:
                made.append(Action(stage, Kind.SEND_GRADIENT, microbatch))
            made += after.get(action, [])
        rows.append(made)
    return schedule.with_rows(rows)


def _post_receives(
    channel: Channel,
    produced: dict[tuple[int, int], int],
    consumers: list[tuple[tuple[int, int], Action]],
    pool: int,
    before: dict[int, list[Action]],
    after: dict[Action, list[Action]],
) -> None:
    """In the producer's order, whatever the order of the consumers: a channel has no other."""
    kind, step = (Kind.RECEIVE_ACTIVATION, 1) if channel[2] == "activation" else (Kind.RECEIVE_GRADIENT, -1)
    in_order = sorted(produced, key=produced.__getitem__)
    turn = {message: i for i, (message, _) in enumerate(consumers)}
    last = 0  # the turn by which every message that must be gone has been consumed
    for number, (stage, microbatch) in enumerate(in_order):
        receive = Action(stage + step, kind, microbatch)
        if number < pool:
            before[channel[1]].append(receive)
        else:
            last = max(last, turn[in_order[number - pool]])
            after[consumers[last][1]].append(receive)
