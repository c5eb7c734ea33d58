"""Where stages live: the four named shapes, and anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.errors import ScheduleError
from gapless.schedule.placement import Placement, explicit, line, loop, replicated, vee


def devices(placement: Placement, num_microbatches: int = 1) -> list[list[int]]:
    return [[placement.device(s, m) for m in range(num_microbatches)] for s in range(placement.num_stages)]


def test_the_drawn_placements() -> None:
    assert devices(line(3)) == [[0], [1], [2]]
    assert devices(loop(2, 2)) == [[0], [1], [0], [1]]
    assert devices(vee(2)) == [[0], [1], [1], [0]]
    assert devices(replicated([2, 1]), 3) == [[0, 1, 0], [2, 2, 2]]


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (line(4), "line"),
        (line(1), "line"),
        (loop(3, 2), "loop"),
        (vee(3), "vee"),
        (replicated([2, 1, 1]), "replicated"),
        (explicit(2, [[0], [0], [1]]), "explicit"),
        (explicit(2, [[0, 0, 1]]), "explicit"),
    ],
)
def test_a_placement_knows_its_shape(placement: Placement, shape: str) -> None:
    assert placement.shape == shape


def test_the_stages_of_a_device_are_ascending() -> None:
    assert vee(2).stages == ((0, 3), (1, 2))
    assert loop(2, 3).stages == ((0, 2, 4), (1, 3, 5))
    assert replicated([2, 1]).stages == ((0,), (0,), (1,))


def test_a_cost_per_device_is_shared_by_the_stages_of_the_fullest_device() -> None:
    assert [explicit(2, [[0], [0], [1]]).share(stage) for stage in range(3)] == [2, 2, 1]
    assert vee(4).share(0) == 2


def test_an_explicit_placement_is_written_in_the_shortest_way() -> None:
    assert explicit(2, [[0, 1, 0, 1], [1, 1]]) == explicit(2, [[0, 1], [1]])
    assert explicit(3, [[0], [1], [2]]) == line(3)


@pytest.mark.parametrize("cycles", [[[2]], [[0], []], [[-1]]])
def test_a_stage_on_no_device_is_refused(cycles: list[list[int]]) -> None:
    with pytest.raises(ScheduleError, match=r"stage \d is placed on .*, but the devices are 0 to 1"):
        explicit(2, cycles)


@given(cycle=st.lists(st.integers(0, 3), min_size=1, max_size=6), num_microbatches=st.integers(1, 12))
def test_the_shortest_way_places_every_microbatch_the_same(cycle: list[int], num_microbatches: int) -> None:
    given_ = Placement(4, (tuple(cycle),))
    for short in (given_.within(num_microbatches), explicit(4, [cycle])):
        assert devices(short, num_microbatches) == devices(given_, num_microbatches)
        assert len(short.cycles[0]) <= len(cycle)
