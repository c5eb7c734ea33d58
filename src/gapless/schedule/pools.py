"""How many buffers a channel needs so that nothing can hang, and how much waits in front of them.

A channel delivers in the producer's order. A receive is posted once a buffer of the channel's pool is free again: with
p buffers, receive n waits until message n-p was consumed. Sends never hold a device up. So a schedule that runs to its
end with endless buffers also does so with p, unless a device consumes some message j < n only after message n, with
n - j >= p: that receive would wait for itself. The least p that is safe is therefore one more than the largest such
n - j, per channel, or 1 where messages are consumed in order.

What was made and has no receive to go to is *unsent* and stays with its sender. How much that can be in any run
follows from what must have been consumed before a message is made:

    0: 0F0 0F1 0F2 0B0 ...        p = 1: while 0F2 ends, nothing need have happened on device 1, so one message is in
    1: 1F0 1B0 ...                the buffer and two are unsent; 0F3 comes after 0B0, and so after 1F0
"""

from bisect import bisect_left
from collections.abc import Iterator

from gapless.schedule.action import Action, Schedule
from gapless.schedule.dependencies import Milestones, replay
from gapless.schedule.routes import MAKERS, Channel, Routes, messages


def receive_buffers(schedule: Schedule) -> dict[Channel, int]:
    """The least pool of receive buffers per channel with which no receive waits for itself."""
    produced, consumed = messages(schedule)
    return {
        channel: _least_pool([produced[channel][message] for message, _ in consumers])
        for channel, consumers in sorted(consumed.items())
    }


def _least_pool(numbers: list[int]) -> int:
    """`numbers`: the messages as they are consumed. One more than the largest n - j with j < n consumed after n."""
    pool = 1
    lowest = len(numbers)
    for number in reversed(numbers):
        if number > lowest:
            pool = max(pool, number - lowest + 1)
        lowest = min(lowest, number)
    return pool


def most_unsent(schedule: Schedule) -> dict[Channel, int]:
    """Per channel the most messages that can be unsent at once, in any run with the pools of `receive_buffers`."""
    pools = receive_buffers(schedule)
    produced, consumed = messages(schedule)
    places = {action: place for row in schedule.rows for place, action in enumerate(row)}
    taken = {channel: [places[action] for _, action in consumers] for channel, consumers in consumed.items()}
    posted = {
        channel: _posted([produced[channel][message] for message, _ in consumers], pools[channel])
        for channel, consumers in consumed.items()
    }
    routes = Routes(schedule.placement)
    found = dict.fromkeys(pools, 0)
    for action, ended in _histories(schedule):
        route = routes.leaving(action) if action.kind in MAKERS else None
        if route is not None and route.crosses:
            channel = route.channel
            certain = bisect_left(taken[channel], ended[channel[1]])
            unsent = produced[channel][route.source, action.microbatch] + 1 - posted[channel][certain]
            found[channel] = max(found[channel], unsent)
    return found


def _posted(numbers: list[int], pool: int) -> list[int]:
    """How many receives were posted once the first 0, 1, 2, ... of these messages are consumed: in their order."""
    found, there, first = [pool], set[int](), 0
    for number in numbers:
        there.add(number)
        while first in there:
            first += 1
        found.append(pool + first)
    return found


def _histories(schedule: Schedule) -> Iterator[tuple[Action, list[int]]]:
    """Every action, and how many actions of each device have ended when it ends, however late they are: those that it
    needs, and all that they need in turn.
    """
    milestones = Milestones(schedule)
    made: list[tuple[int, int, list[int]] | None] = [None] * milestones.size  # by which device, as its how many-th
    ended = [[0] * schedule.num_devices for _ in schedule.rows]
    for device, action, needs, gives in replay(schedule, milestones):
        for base in needs:
            if (need := made[base + action.microbatch]) is not None:
                source, count, theirs = need
                if ended[device][source] < count:  # news: others have been heard of on the way
                    ended[device] = list(map(max, ended[device], theirs))
                    ended[device][source] = count
        ended[device][device] += 1
        for base in gives:
            made[base + action.microbatch] = device, ended[device][device], ended[device]
        yield action, ended[device]
