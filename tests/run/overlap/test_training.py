"""An optimizer step that does not wait has the bits of one that does, whatever is clipped or left out on the way."""

import pytest

from tests.run.overlap.plain_training import OPTIMIZERS, Run, differences, overlapped, plain


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "zb-v"])
def test_training_has_the_bits_of_a_loop_that_waits(schedule: str, optimizer: str) -> None:
    run = Run(1, schedule=schedule, optimizer=optimizer, norms=True, bad=(5, 13), large=(3, 8, 9, 10, 16), read=(7,))
    assert differences(plain(run, 18), overlapped(run, 18)) == []


@pytest.mark.parametrize("seed", range(6))
def test_random_runs_have_the_bits_of_a_loop_that_waits(seed: int) -> None:
    run = Run.random(seed, 20)
    assert differences(plain(run, 20), overlapped(run, 20)) == [], run


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_runs_have_the_bits_of_a_loop_that_waits(seed: int) -> None:
    run = Run.random(seed, 200)
    assert differences(plain(run, 200), overlapped(run, 200)) == [], run
