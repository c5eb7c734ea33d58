"""The protocol of channels in GPU memory, without a GPU: two hosts and two streams that go on in any order."""

import random
from collections import deque

import pytest

from gapless.run.ranks.wire.gpu_memory.slots import Slot, Slots, at_once, capacity_for, most_bytes
from gapless.run.ranks.wire.static_shapes import Rehearsal

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


class StaticChannel(Channel):
    """Every step has messages of these sizes, one after another; only the first step is told."""

    def __init__(self, dice: random.Random, sizes: list[int]) -> None:
        super().__init__(dice)
        self.sizes = sizes
        self.written: Rehearsal[Slot] = Rehearsal()
        self.read: Rehearsal[int] = Rehearsal()
        self.program = Program()

    def send_next(self) -> None:
        number = self.slots.sent
        if number % len(self.sizes) == 0:
            self.slots.add(self.written.begin(self.program))
        slot = self.written.next()
        if slot is None:
            self.send(self.sizes[number % len(self.sizes)])
            used = next(each for each in self.slots._slots if each.message == number)
            self.slots.keep(used)
            self.written.note(used)
            return
        taken = self.slots.again(slot)
        assert taken.after == number - len(self.sizes) + 1, "waits for what was received in the step before"
        self.sender.append(("wait", taken.after, 0))
        self.sender.append(("copy in", slot.name, number))
        self.sender.append(("arrive", number + 1, 0))

    def receive_next(self) -> bool:
        """Whether the host could queue it: in the first step it has to be told."""
        if self.queued % len(self.sizes) == 0 and self.queued == self.begun * len(self.sizes):
            self.read.begin(self.program)
            self.begun += 1
        name = None if self.read.is_on else self.read.next()
        if name is None:
            if not self.told:
                return False
            self.read.note(name := self.told[0])
        else:
            self.told.appendleft(name)
        self.receive()
        return True

    begun = 0


class Program:
    """What a rehearsal belongs to."""


@pytest.mark.parametrize("seed", range(50))
def test_messages_of_steps_that_are_alike_need_no_word_however_far_hosts_run_ahead(seed: int) -> None:
    dice = random.Random(seed)
    channel, steps = StaticChannel(dice, [dice.choice((1, 1, 2)) for _ in range(dice.randint(1, 9))]), 12
    messages, sends = steps * len(channel.sizes), dice.random()
    while len(channel.got) < messages:
        before = channel.slots.sent, channel.queued, len(channel.got)
        if dice.random() < sends and channel.slots.sent < messages:
            channel.send_next()
        if dice.random() > sends and channel.queued < messages:
            channel.receive_next()
        went = channel.go_on()
        both_done = channel.slots.sent == messages == channel.queued
        assert went or not both_done or before[2] < len(channel.got), "both streams wait"
    assert channel.got == list(range(messages))
    assert channel.made == len(channel.sizes)


def test_what_comes_between_two_steps_is_no_message_of_them() -> None:
    """An evaluation after the first step: its messages are told, and have no slots of their own."""
    known, program = Rehearsal[str](), Program()
    known.begin(program)
    known.note("a slot")
    known.end()
    for _ in range(2):
        assert known.next() is None
        assert not known.is_on
        known.note("of the evaluation")
        known.begin(program)
        assert [known.next(), known.next()] == ["a slot", None]
        known.end()


def test_what_a_program_knew_that_is_no_more_is_free_again() -> None:
    known: Rehearsal[str] = Rehearsal()
    first, second = Program(), Program()
    for program in (first, second):
        assert known.begin(program) == []
        assert known.next() is None
        known.note("a slot")
        known.note(None)
    assert known.begin(first) == []
    assert [known.next(), known.next(), known.next()] == ["a slot", None, None]
    del first, program
    assert known.begin(second) == ["a slot"]
    assert known.begin(second) == []
    assert known.next() == "a slot"


@pytest.mark.parametrize("size", [1, 4096, 1 << 20, 5 << 20, 200 << 20])
def test_what_a_plan_counts_for_slots_is_what_channels_take(size: int) -> None:
    channel = Channel(random.Random(0))
    for _ in range(20):
        slots, capacity = channel.slots, capacity_for(size)
        if slots.take(size, at_once(capacity), channel.queued, channel.done) is None:
            slots.add([Slot(channel.made, channel.made, capacity)])
            channel.made += 1
            assert slots.take(size, at_once(capacity), channel.queued, channel.done) is not None
        channel.queued += 1
    assert 4 * channel.made * capacity == most_bytes(size)
