"""Channels of a rank where shapes are static, over a carrier that needs no GPU."""

import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import pytest

from gapless.run.ranks.wire.channel import Carrier, Courier, Incoming, Outgoing, Waiting
from gapless.run.ranks.wire.connections import Connections, RankChannels
from gapless.run.ranks.wire.static_shapes import PLAY, REHEARSE, Rehearsal, StaticShapes
from gapless.schedule.action import Schedule
from gapless.schedule.lower.inference import forward_only
from gapless.schedule.recipes import make_schedule
from gapless.schedule.routes import Channel, messages


class Wire:
    """Between two ends in this process: what was sent, and what the other end was told of it."""

    def __init__(self) -> None:
        self.sent: deque[str] = deque()
        self.told: deque[str] = deque()


class Sends(Outgoing):
    def __init__(self, courier: Courier, wire: Wire) -> None:
        super().__init__(courier)
        self._wire, self._known = wire, Rehearsal[str]()
        self.begin, self.end = self._known.begin, self._known.end  # type: ignore[method-assign, assignment]

    def put(self, item: Any) -> None:
        expected = self._known.next()
        assert expected in (None, item), f"{item} came, where {expected} was known"
        if expected is None:
            self._known.note(item)
            self._wire.told.append(item)
        self._wire.sent.append(item)

    def send(self, item: Any, stamp: bytes | None = None) -> None:
        self.put(item)

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Receives(Incoming):
    def __init__(self, waiting: Waiting, source: int, kind: str, wire: Wire) -> None:
        super().__init__(waiting, source, kind)
        self._wire, self._known = wire, Rehearsal[str]()
        self.begin, self.end = self._known.begin, self._known.end  # type: ignore[method-assign, assignment]

    def next(self) -> Any:
        if (known := self._known.next()) is None:
            self._known.note(known := self._wire.told.popleft())
        assert self._wire.sent.popleft() == known
        return known

    def close(self) -> None: ...


class InOneProcess(Carrier):
    in_stream = True

    def __init__(self, rank: Connections, wires: dict[Channel, Wire]) -> None:
        self._rank, self._wires = rank, wires

    def outgoing(self, target: int, kind: str) -> Outgoing:
        return Sends(self._rank.courier, self._wires[self._rank.device, target, kind])

    def incoming(self, source: int, kind: str) -> Incoming:
        return Receives(self._rank.waiting, source, kind, self._wires[source, self._rank.device, kind])

    def break_off(self) -> None: ...


class Pair:
    """Two ranks, the messages of which are words."""

    def __init__(self, courier: Courier) -> None:
        self.wires: dict[Channel, Wire] = defaultdict(Wire)
        self.ranks = [Connections(courier, device, (0, 1), lambda _, error: RuntimeError(error)) for device in (0, 1)]
        for rank in self.ranks:
            rank.carriers, rank.in_parcels, rank.static = [InOneProcess(rank, self.wires)], True, StaticShapes()

    def program(self, schedule: Schedule) -> list[RankChannels]:
        return [RankChannels(schedule, rank) for rank in self.ranks]

    def run(self, schedule: Schedule, program: list[RankChannels], word: str) -> Counter[str]:
        """How many messages of each kind were told."""
        told: Counter[str] = Counter()
        for channels in program:
            channels.begin()
        for channel, numbers in messages(schedule)[0].items():
            source, target, kind = channel
            send, receive = program[source].sender(channel), program[target].receiver(channel)
            for _ in numbers:
                send(f"{kind} {word}")
            told[kind] += len(self.wires[channel].told)
            assert [receive() for _ in numbers] == [f"{kind} {word}"] * len(numbers)
        for channels in program:
            channels.end()
        return told


@pytest.fixture
def pair() -> Iterator[Pair]:
    courier = Courier(None, "test", print)
    yield Pair(courier)
    courier.close()


def test_only_the_first_step_of_a_program_is_told_and_every_evaluation(pair: Pair) -> None:
    whole, fewer = (make_schedule("1f1b", devices=2, microbatches=count) for count in (4, 3))
    evaluation = forward_only(whole)
    step, short_step, evaluate = pair.program(whole), pair.program(fewer), pair.program(evaluation)
    all_told, none_told = {"activation": 4, "gradient": 4}, {"activation": 0, "gradient": 0}
    assert pair.run(whole, step, "of 8 rows") == all_told
    assert pair.run(evaluation, evaluate, "of 8 rows") == {"activation": 4}  # after the first step
    assert pair.run(whole, step, "of 8 rows") == none_told
    assert pair.run(evaluation, evaluate, "of 5 rows") == {"activation": 4}
    assert pair.run(fewer, short_step, "of 3 rows") == {"activation": 3, "gradient": 3}
    for rows in (1, 2):
        assert pair.run(evaluation, evaluate, f"of {rows} rows") == {"activation": 4}
        assert pair.run(whole, step, "of 8 rows") == none_told
        assert pair.run(fewer, short_step, "of 3 rows") == none_told


def test_a_program_that_one_rank_has_made_anew_is_rehearsed_by_all(pair: Pair) -> None:
    """As after a hook that only one rank has added: the other one would read where nothing is written any more."""
    schedule = make_schedule("zb-h1", devices=2, microbatches=2)
    step = pair.program(schedule)
    first = pair.run(schedule, step, "of 8 rows")
    assert first == {"activation": 2, "gradient": 2}
    assert pair.run(schedule, step, "of 8 rows").total() == 0
    step[0] = RankChannels(schedule, pair.ranks[0])
    assert agree(step) == [REHEARSE, PLAY]
    assert pair.run(schedule, step, "of 8 rows") == first
    assert agree(step) == [PLAY, PLAY]
    assert pair.run(schedule, step, "of 8 rows").total() == 0


class Stages:
    """A program without any graphs."""

    stages: Any = {}  # noqa: RUF012


PROGRAM: Any = Stages()


def agree(step: list[RankChannels]) -> list[int]:
    """What each rank could do; all of them do the least of it."""
    found: list[int] = []

    def note(_: object, mine: int) -> int:
        found.append(mine)
        raise InterruptedError

    for each in step:
        with contextlib.suppress(InterruptedError):
            each.agree(PROGRAM, None, None, note)
    for each in step:
        each.agree(PROGRAM, None, None, lambda *_: min(found))
    return found


class Meeting:
    """The group of a pipeline, in which somebody looks at a rank that waits."""

    def __init__(self) -> None:
        self.rank: Connections | None = None
        self.since: list[float | None] = []

    def barrier(self) -> "Meeting":
        return self

    def wait(self) -> None:
        assert self.rank is not None
        self.since.append(self.rank.waiting.since)


def test_a_rank_that_meets_the_others_is_not_busy() -> None:
    """Or nobody would notice that all ranks wait, and a rank with little to do would pass for a slow one."""
    group = Meeting()
    courier = Courier(group, "test", print)
    rank = group.rank = Connections(courier, 0, (0, 1), lambda _, error: RuntimeError(error))
    before = rank.waiting.seconds
    rank.meet()
    assert [each is not None for each in group.since] == [True]
    assert rank.waiting.since is None
    assert rank.waiting.seconds > before
    courier.close()
