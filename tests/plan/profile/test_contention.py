"""What devices cost each other: put into the costs of the schedule that is planned."""

import pytest

from gapless.plan.profile.contention import ALONE, Contention
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate


def makespan(contention: Contention, devices: int, microbatches: int) -> float:
    schedule = make_schedule("gpipe", devices=devices, microbatches=microbatches)
    return float(simulate(schedule, contention.costs(Costs(), schedule)).makespan)


def test_alone_nothing_takes_longer() -> None:
    schedule, costs = make_schedule("1f1b", devices=2, microbatches=4), Costs(forward=(1, 2), backward=(2, 3))
    assert ALONE.costs(costs, schedule) is costs
    one = make_schedule("1f1b", devices=1, microbatches=4)
    assert Contention(2.0, 2.0, 2.0).costs(Costs(), one) == Costs()


def test_each_kind_of_action_has_a_slowdown_of_its_own() -> None:
    schedule = make_schedule("1f1b", devices=2, microbatches=4)
    found = Contention(forward=1.5, backward=1.25, halves=2.0).costs(Costs(recompute=2), schedule)
    assert (found.forward, found.recompute) == ((1.5, 1.5), (3.0, 3.0))
    assert (found.backward, found.input_grad, found.weight_grad) == ((2.5, 2.5), (2.0, 2.0), (2.0, 2.0))


def test_more_devices_than_processors_take_turns() -> None:
    # All four want to run all the time but at the ends, and two can.
    plain = makespan(ALONE, 4, 64)
    assert 1.8 < makespan(Contention(at_once=2.0), 4, 64) / plain < 2.0
    assert makespan(Contention(at_once=4.0), 4, 64) == plain
    # With one microbatch no two devices ever want to run at the same time; of replicas each has less than a processor.
    assert makespan(Contention(at_once=1.0), 2, 1) == makespan(ALONE, 2, 1)
    assert makespan(Contention(at_once=0.5), 2, 1) == pytest.approx(2 * makespan(ALONE, 2, 1))
    # What those who run at once cost each other comes on top.
    assert 1.2 * 1.8 < makespan(Contention(1.2, 1.2, 1.2, at_once=2.0), 4, 64) / plain < 1.2 * 2.0
