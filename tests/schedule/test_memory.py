"""What is held from when to when, action by action."""

from gapless.schedule import lower
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.memory import levels, peaks
from gapless.schedule.recipes import make_schedule

UNEVEN = Costs(activation=10, kept_for_weight_grad=4, boundary=1)


def held(drawing: str, costs: Costs = UNEVEN) -> list[tuple[float, float]]:
    """Per action of the only device: what is held while it runs, and after it has ended."""
    (row,) = levels(Schedule.parse(drawing), costs)
    return [(float(during), float(after)) for during, after in row]


def test_a_forward_takes_and_a_backward_gives_back() -> None:
    assert held("0: 0F0 0F1 0B0 0B1") == [(10, 10), (20, 20), (20, 10), (10, 0)]


def test_an_input_gradient_gives_back_all_but_what_the_weight_gradient_needs() -> None:
    assert held("0: 0F0 0I0 0F1 0W0 0I1 0W1") == [(10, 10), (10, 4), (14, 14), (14, 10), (10, 4), (4, 0)]


def test_a_recomputed_microbatch_keeps_its_input_alone_until_its_recompute() -> None:
    assert held("0: 0F0 0F1 0R0 0B0 0B1") == [(1, 1), (11, 11), (21, 21), (21, 10), (10, 0)]
    assert held("0: 0F0 0R0 0I0 0W0") == [(1, 1), (11, 11), (11, 5), (5, 0)]


def test_no_more_is_kept_for_a_weight_gradient_than_there_is() -> None:
    assert held("0: 0F0 0I0 0W0", Costs(activation=2, kept_for_weight_grad=5)) == [(2, 2), (2, 2), (2, 0)]


def test_inference_keeps_nothing() -> None:
    # A forward-only gpipe once seemed to hold all M microbatches, as if a backward were to come.
    assert held("0: 0F0 0F1") == [(10, 0), (10, 0)]
    assert peaks(lower.forward_only(make_schedule("gpipe", devices=3, microbatches=8)), Costs()) == (1, 1, 1)


def test_updates_and_transfers_hold_nothing() -> None:
    plain = make_schedule("1f1b", devices=3, microbatches=4)
    written = lower.add_transfers(lower.add_updates(plain))
    assert peaks(written, Costs()) == peaks(plain, Costs()) == (3, 2, 1)


def test_a_list_of_activations_is_per_stage() -> None:
    schedule = make_schedule("gpipe", devices=2, microbatches=3)
    assert peaks(schedule, Costs(activation=[1, 10])) == (3, 30)


def test_everything_is_given_back_in_the_end() -> None:
    for name in ("1f1b", "zb-h1", "zb-v", "interleaved", "dualpipe-v"):
        for row in levels(make_schedule(name, devices=3, microbatches=4), UNEVEN):
            assert row[-1][1] == 0
