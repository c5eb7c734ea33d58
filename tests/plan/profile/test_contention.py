"""What devices cost each other: put into the costs of the schedule that is planned."""

import pytest

from gapless.plan.profile.contention import ALONE, Contention, shared_makespan
from gapless.schedule.action import Action, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes, dependencies
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


def test_replicas_of_one_device_each_are_beside_each_other_too() -> None:
    one = make_schedule("1f1b", devices=1, microbatches=4)
    assert Contention(2.0, 2.0, 2.0).costs(Costs(), one, replicas=4).forward == (2.0,)
    assert Contention(1.5, 1.0, 1.0, at_once=2.0).costs(Costs(), one, replicas=4).forward == (3.0,)


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


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
@pytest.mark.parametrize("link", [{}, {"latency": 0.3}, {"latency": 0.3, "bandwidth": 1.0, "boundary": 4}])
def test_with_a_processor_for_each_the_step_is_the_simulated_one(name: str, link: dict[str, float]) -> None:
    schedule, costs = make_schedule(name, devices=4, microbatches=6), Costs(input_grad=1.5, **link)
    assert shared_makespan(schedule, costs, 4.0) == pytest.approx(float(simulate(schedule, costs).makespan))


def test_processors_that_are_shared_stand_idle_while_a_pipeline_fills() -> None:
    schedule = make_schedule("gpipe", devices=3, microbatches=3)
    costs = Costs(backward=1)
    plain = float(simulate(schedule, costs).makespan)
    assert plain == 10
    # Three at once only in one slot of the forwards and one of the backwards: each takes half as long again.
    assert shared_makespan(schedule, costs, 2.0) == pytest.approx(11.0)
    # One processor: the work of all, one after another.
    assert shared_makespan(schedule, costs, 1.0) == pytest.approx(18.0)


def slowly(schedule: Schedule, costs: Costs, processors: float, step: float) -> float:
    """The same by small steps of time: all that can run gets its share of each."""
    durations = costs.durations(schedule.placement)
    left = [[float(durations[a.kind][a.stage]) for a in row] for row in schedule.rows]
    at, time = [0] * len(left), 0.0
    done: set[Action] = set()
    while any(place < len(row) for place, row in zip(at, left, strict=True)):
        able = [
            device
            for device, row in enumerate(schedule.rows)
            if at[device] < len(row) and done.issuperset(dependencies(row[at[device]], schedule))
        ]
        for device in able:
            left[device][at[device]] -= step * min(1.0, processors / len(able))
        for device in able:
            if left[device][at[device]] <= 1e-9:
                done.update(completes(schedule.rows[device][at[device]]))
                at[device] += 1
        time += step
    return time


@pytest.mark.parametrize("processors", [0.7, 1.5, 2.0])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_shared_processors_agree_with_time_in_small_steps(name: str, processors: float) -> None:
    schedule, costs = make_schedule(name, devices=3, microbatches=4), Costs(forward=1, input_grad=1.4, weight_grad=0.8)
    assert shared_makespan(schedule, costs, processors) == pytest.approx(
        slowly(schedule, costs, processors, 0.02), rel=0.02
    )
