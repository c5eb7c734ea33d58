"""What a change of the machine brings: the plan of the changed machine, against that of the one there is."""

from dataclasses import replace

import pytest

from gapless.errors import ConfigError
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Link
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions
from gapless.plan.search.what_if import Answer, read_changes, usual_changes, what_if
from tests.plan import profiles

WANTED = SearchOptions(schedules=["1f1b"])
SLOW = (Link("slow", None, 1e-4, 1e9),)


def asked(changes: str, limit: int | None = None, count: int = 2) -> list[Answer]:
    profile = profiles.even(8, SLOW, seconds=3e-3, parameters=10 * profiles.MIB, activation=20 * profiles.MIB)
    devices = [Device(limit)] * count
    best = search(profile, devices, WANTED, 16).best
    return what_if(profile, devices, best, read_changes(changes), WANTED)


def test_each_change_is_planned_as_a_machine_that_has_it() -> None:
    profile = profiles.even(8, SLOW, seconds=3e-3, parameters=10 * profiles.MIB, activation=20 * profiles.MIB)
    answers = asked("devices+1,bandwidth*2,speed*2,latency/2,minibatch*2")
    three = search(profile, 3, WANTED, 16).best
    quicker = search(replace(profile, links=(Link("slow", None, 1e-4, 2e9),)), 2, WANTED, 16).best
    twice = search(profile, [Device(speed=2.0)] * 2, WANTED, 16).best
    near = search(replace(profile, links=(Link("slow", None, 5e-5, 1e9),)), 2, WANTED, 16).best
    longer = search(profile, 2, WANTED, 32).best
    for answer, plan in zip(answers, (three, quicker, twice, near, longer), strict=True):
        assert answer.plan is not None
        assert answer.plan.throughput == plan.throughput
        assert answer.gain > 0
    assert answers[2].gain > 0.9  # all of it computes


def test_more_memory_is_no_gain_where_nothing_wants_it_and_is_one_where_it_does() -> None:
    roomy, tight = 10 * 2**30, 280 * profiles.MIB
    (nothing,) = asked("memory+8GiB", roomy)
    assert (nothing.plan, nothing.gain, nothing.reason) == (None, 0.0, "nothing is faster then")
    (more,) = asked("memory+8GiB", tight)
    assert more.plan is not None
    assert more.gain > 0
    assert more.plan.limits == (tight + 8 * 2**30,) * 2


def test_what_can_not_be_changed_is_said_in_its_place() -> None:
    (free,) = asked("memory+8GiB")
    assert free.reason == "the devices have no memory limit: give --memory"
    profile = profiles.even(4, seconds=3e-3)
    best = search(profile, 2, WANTED, 8).best
    (linked,) = what_if(profile, [Device()] * 2, best, read_changes("bandwidth*2"), WANTED)
    assert linked.reason == "hops are free in this profile: give it links, or --bandwidth"


def test_what_everybody_asks_is_asked_where_it_makes_sense() -> None:
    def texts(limit: int | None, links: tuple[Link, ...]) -> list[str]:
        profile = profiles.even(4, links)
        return [change.text for change in usual_changes(profile, [Device(limit)] * 2)]

    assert texts(2**30, SLOW) == ["memory+8GiB", "devices+1", "bandwidth*2"]
    assert texts(None, ()) == ["devices+1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory", "'memory' is not a change: write memory"),
        ("memory-8GiB", "'memory-8GiB' is not a change"),
        ("memory+8gb/s", "'memory\\+8gb/s': the size is '8gb/s', but it must be a number of bytes"),
        ("devices+0", "'devices\\+0': '0' must be a whole number above 0"),
        ("devices+1.5", "'1.5' must be a whole number above 0"),
        ("devices+1000000000", "'devices\\+1000000000': a plan is made for at most 4096 devices"),
        ("bandwidth*x", "'x' must be a number above 0"),
        ("speed+2", "'speed\\+2' is not a change"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_changes(text)
