"""The protocol of channels in GPU memory, without a GPU: two hosts and two streams that go on in any order."""

import random
from collections import deque

import pytest

from gapless.run.ranks.wire.slots import Slot, Slots

AT_ONCE = 3


class Channel:
    """A sender and a receiver, each a host that queues and a stream that does; what is in a slot is a message."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.slots, self.made = Slots(), 0
        self.memory: dict[int, int] = {}
        self.sender: deque[tuple[str, int, int]] = deque()  # what its stream has still to do
        self.receiver: deque[tuple[str, int, int]] = deque()
        self.told: deque[int] = deque()  # names of slots, in the pipe
        self.queued = self.done = self.arrived = 0
        self.got: list[int] = []

    def send(self, size: int) -> None:
        number = self.slots.sent
        taken = self.slots.take(size, AT_ONCE, self.queued, self.done)
        if taken is None:
            self.slots.add([Slot(self.made, self.made, size)])
            self.made += 1
            taken = self.slots.take(size, AT_ONCE, self.queued, self.done)
        assert taken is not None
        assert taken.slot.capacity >= size
        assert taken.after <= self.queued, "waits for a copy that nobody has queued"
        if taken.after:
            self.sender.append(("wait", taken.after, 0))
        self.sender.append(("copy in", taken.slot.name, number))
        self.sender.append(("arrive", number + 1, 0))
        self.told.append(taken.slot.name)

    def receive(self) -> None:
        name = self.told.popleft()
        self.receiver.append(("wait", self.queued + 1, 0))
        self.receiver.append(("copy out", name, self.queued))
        self.receiver.append(("done", self.queued + 1, 0))
        self.queued += 1

    def go_on(self) -> bool:
        """One of the streams does its next thing, if one can."""
        ready = [stream for stream in (self.sender, self.receiver) if stream and self._can(stream)]
        if not ready:
            return False
        what, name, number = (stream := self.dice.choice(ready)).popleft()
        if what == "copy in":
            self.memory[name] = number
        elif what == "arrive":
            self.arrived = name
        elif what == "copy out":
            self.got.append(self.memory[name])
        elif what == "done":
            self.done = name
        del stream
        return True

    def _can(self, stream: deque[tuple[str, int, int]]) -> bool:
        what, number, _ = stream[0]
        return what != "wait" or (self.done if stream is self.sender else self.arrived) >= number


@pytest.mark.parametrize("seed", range(50))
def test_every_message_is_copied_out_as_it_was_copied_in(seed: int) -> None:
    dice = random.Random(seed)
    channel, messages = Channel(dice), 200
    eager = dice.random()  # how far hosts run ahead of their streams
    while len(channel.got) < messages:
        choice = dice.random()
        if choice < eager and channel.slots.sent < messages:
            channel.send(dice.choice((1, 1, 1, 2)))
        elif choice < 2 * eager and channel.told:
            channel.receive()
        elif not channel.go_on() and not channel.told and channel.slots.sent == messages:
            break
    assert channel.got == list(range(messages))


def test_as_many_slots_are_made_as_are_used_at_once_however_far_hosts_run_ahead() -> None:
    channel = Channel(random.Random(0))
    for _ in range(50):
        channel.send(1)
        channel.receive()
    assert channel.made == AT_ONCE
    while channel.go_on():
        pass
    assert channel.got == list(range(50))


def test_a_sender_never_waits_for_a_receiver_that_does_not_take_its_messages() -> None:
    channel = Channel(random.Random(0))
    for _ in range(10):
        channel.send(1)
    assert channel.made == 10
