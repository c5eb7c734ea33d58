"""Schedules as they are run, with one thing changed: `verify` finds all that a machine of its own can't carry out, and
accepts what that can."""

import random

import pytest

from gapless.errors import ScheduleError
from gapless.schedule import lower
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.lower import Passes, lowered
from gapless.schedule.recipes import RECIPES, make_schedule
from gapless.schedule.verify import verify
from tests.schedule.judge import fault, tokens

KINDS = [kind for kind in Kind if kind is not Kind.VERDICT]  # whose rules have a test of their own
NAMED = sorted(name for name in RECIPES if name not in ("auto", "optimal"))
PASSES = {
    "as stated": Passes(),
    "transfers": Passes(transfers=True),
    "updates and transfers": Passes(updates=True, transfers=True),
    "recompute, updates and transfers": Passes(recompute=range(2), updates=True, transfers=True),
    "split, fused and transfers": Passes(split=True, fuse=True, transfers=True),
    "offloaded, recomputed and transfers": Passes(recompute=[0], offload=range(8), transfers=True),
    "inference": Passes(forward_only=True, transfers=True),
}


def made(name: str, passes: Passes, K: int, M: int) -> Schedule:
    schedule = make_schedule(name, devices=K, microbatches=max(M, K) if name == "2bw" else M, minibatches=2)
    return lowered(schedule, None, passes)


Rows = list[list[Action]]


def mutant(schedule: Schedule, chance: random.Random) -> Rows:
    """An action left out, put elsewhere, exchanged with another one, or another one altogether; or one added."""
    rows = [list(row) for row in schedule.rows]
    device, position = place(rows, chance)
    action = rows[device][position]
    any_action = Action(
        chance.randrange(schedule.num_stages), chance.choice(KINDS), chance.randrange(schedule.num_microbatches)
    )
    kind = chance.randrange(6)
    if kind == 0:
        return changed(rows, device, position, 1)
    if kind == 1:
        return changed(rows, device, position, 1, any_action)
    if kind == 2:
        return changed(rows, device, position, 0, any_action)
    if kind == 3:
        other, at = place(rows, chance)
        return changed(changed(rows, device, position, 1, rows[other][at]), other, at, 1, action)
    without = changed(rows, device, position, 1)
    other = device if kind == 4 else chance.randrange(len(rows))
    return changed(without, other, chance.randint(0, len(without[other])), 0, action)


def place(rows: Rows, chance: random.Random) -> tuple[int, int]:
    device = chance.choice([device for device, row in enumerate(rows) if row])
    return device, chance.randrange(len(rows[device]))


def changed(rows: Rows, device: int, position: int, gone: int, *instead: Action) -> Rows:
    """The rows with `gone` actions of a device replaced."""
    row = rows[device]
    return [*rows[:device], [*row[:position], *instead, *row[position + gone :]], *rows[device + 1 :]]


def opinion(schedule: Schedule) -> bool:
    try:
        return verify(schedule).ok
    except ScheduleError:
        return False


def disagreements(original: Schedule, chosen: list[Rows]) -> list[str]:
    """With the placement that is known, and from the text alone: where the two opinions differ."""
    home = {
        (stage, m): original.placement.device(stage, m)
        for stage in range(original.num_stages)
        for m in range(original.num_microbatches)
    }
    found = []
    for mutant in map(original.with_rows, chosen):
        rows = tokens(mutant.text())
        if opinion(mutant) != ((reason := fault(rows, home)) is None):
            found.append(f"{mutant}\nknown placement, judge: {reason}")
        try:
            accepted = opinion(Schedule.parse(mutant.text()))
        except ScheduleError:
            accepted = False
        if accepted != ((reason := fault(rows)) is None):
            found.append(f"{mutant}\ntext alone, judge: {reason}")
    return found


def schedules(sizes: tuple[tuple[int, int], ...]) -> list[Schedule]:
    """Every recipe after every pass, and replicated stages."""
    found = [made(name, passes, K, M) for name in NAMED for passes in PASSES.values() for K, M in sizes]
    flows = [make_schedule("pipedream", devices=3, microbatches=4, replicas=split) for split in ((2, 1), (1, 2))]
    return [*found, *flows, *map(lower.add_transfers, flows)]


def held_against_the_judge(sizes: tuple[tuple[int, int], ...], each: int, seed: int) -> tuple[int, int]:
    """So many mutants of each schedule; how many there were, and how many of them the judge calls wrong."""
    chance, count, wrong = random.Random(seed), 0, 0
    for original in schedules(sizes):
        assert disagreements(original, [[*map(list, original.rows)]]) == []
        assert fault(tokens(original.text())) is None
        chosen = [mutant(original, chance) for _ in range(each)]
        assert disagreements(original, chosen) == []
        count += len(chosen)
        wrong += sum(fault(tokens(original.with_rows(rows).text())) is not None for rows in chosen)
    return count, wrong


def test_verify_finds_every_mutant_that_can_not_be_carried_out_and_accepts_the_others() -> None:
    count, wrong = held_against_the_judge(((2, 2),), 4, seed=1)
    assert count > 300
    assert count / 2 < wrong < count


@pytest.mark.slow
@pytest.mark.timeout(840)
def test_verify_and_the_judge_agree_on_thousands_of_mutants() -> None:
    count, wrong = held_against_the_judge(((2, 2), (2, 3), (3, 3)), 50, seed=2)
    print(f"{count:,} mutants, {wrong:,} of them wrong")
    assert count > 10_000
