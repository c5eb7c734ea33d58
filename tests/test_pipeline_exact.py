"""Any schedule, any number of devices and microbatches, any remat: the bits of the plain loop on one device.

The normal run takes a sample in which every schedule meets every K, every M, every remat and every model; the whole
product is `slow`.
"""

from itertools import product
from typing import Any

import pytest

import gapless
from gapless.schedule.action import Schedule
from gapless.schedule.recipes import RECIPES
from tests.pipelines import CASES, STEPS, Case, assert_steps_are_exact, schedule_named

SCHEDULES = (*(name for name, recipe in RECIPES.items() if recipe.synchronous), "text", "object")
DEVICES = (1, 2, 3, 4)
MICROBATCHES = (1, 3, 4, 8, 13)
REMATS = ("none", "stage", "layer", "each stage its own")


def check(
    name: str,
    devices: int,
    microbatches: int,
    remat: str,
    case: Case,
    *,
    steps: int = STEPS,
) -> None:
    depth = 8 if devices <= 4 else 2 * devices
    schedule = schedule_named(name, devices, microbatches)
    asked: str | list[str] = remat
    if remat == "each stage its own":
        known = (
            schedule
            if isinstance(schedule, Schedule)
            else gapless.make_schedule(schedule, devices=devices, microbatches=microbatches)
        )
        asked = [REMATS[stage % 3] for stage in range(known.num_stages)]
    options: dict[str, Any] = {"schedule": schedule, "remat": asked}
    assert_steps_are_exact(case, depth=depth, devices=devices, microbatches=microbatches, steps=steps, **options)


def sample() -> list[tuple[str, int, int, str, Case]]:
    """Latin squares: each schedule meets each K and each M, with different remats and models."""
    chosen = []
    for number, name in enumerate(SCHEDULES):
        for turn, devices in enumerate((*DEVICES, 3)):
            microbatches = MICROBATCHES[(turn + number) % 5]
            remat = REMATS[(turn + number // 4) % 4]
            case = CASES[(turn + number) % 4]
            chosen.append((name, devices, microbatches, remat, case))
    return chosen


def described(value: object) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("name", "devices", "microbatches", "remat", "case"), sample(), ids=described)
def test_a_step_gives_the_bits_of_the_plain_loop(
    name: str, devices: int, microbatches: int, remat: str, case: Case
) -> None:
    # Of many microbatches two steps, which accumulate; every schedule has three, with a zero_grad between, with few.
    steps = STEPS if microbatches < 8 else 2
    check(name, devices, microbatches, remat, case, steps=steps)


def test_the_sample_meets_every_value_with_every_schedule() -> None:
    chosen = sample()
    for position, values in ((1, DEVICES), (2, MICROBATCHES), (3, REMATS), (4, CASES)):
        met = {(row[0], row[position]) for row in chosen}
        assert met == set(product(SCHEDULES, values))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=described)
@pytest.mark.parametrize("devices", [*DEVICES, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_whole_product_gives_the_bits_of_the_plain_loop(name: str, devices: int, case: Case) -> None:
    for microbatches, remat in product(MICROBATCHES, REMATS):
        check(name, devices, microbatches, remat, case)
