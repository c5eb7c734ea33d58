"""A schedule unrolled gives the times of the schedule played action by action, to the fraction."""

import random
from fractions import Fraction

import pytest

from gapless.errors import ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import RECIPES, make_schedule
from gapless.schedule.simulate import _played, simulate
from gapless.schedule.unrolled import unrolled

NAMED = sorted(name for name in RECIPES if name not in ("auto", "optimal"))


def some_costs(chance: random.Random, stages: int, bandwidth: Fraction | None) -> Costs:
    def each() -> list[Fraction]:
        return [Fraction(chance.randint(0, 9), chance.randint(1, 9)) for _ in range(stages)]

    return Costs(each(), each(), each(), each(), each(), Fraction(1, 3), bandwidth, boundary=each())


@pytest.mark.parametrize("name", NAMED)
def test_it_takes_the_same_times(name: str) -> None:
    chance = random.Random(name)
    for K, M in ((1, 3), (2, 4), (3, 5)):
        plain = make_schedule(name, devices=K, microbatches=M)
        schedules = [plain, lower.add_updates(plain)]
        schedules += [lower.add_recompute(plain)] if RECIPES[name].synchronous else []
        for schedule in schedules:
            for bandwidth in (None, Fraction(3, 7)):
                costs = some_costs(chance, schedule.num_stages, bandwidth)
                starts, ends = _played(schedule, costs)
                found = simulate(schedule, costs)
                assert (found.starts, found.ends) == (tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def test_needs_are_the_numbers_of_what_comes_from_elsewhere() -> None:
    found = unrolled(Schedule.parse("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"))
    assert found is not None
    assert [needs for _, _, needs in found.steps] == [(), (), (0,), (), (1,), (), (3,), (5,)]
    assert found.num_wires == 2


def test_written_transfers_are_played() -> None:
    assert unrolled(lower.add_transfers(make_schedule("1f1b", devices=2, microbatches=2))) is None


def test_what_hangs_is_said() -> None:
    with pytest.raises(ScheduleError, match="can't be run to its end"):
        simulate(Schedule.parse("0: 0B0 0F0"))
