"""Whatever a file says: `verify` gives a report, `simulate` a timeline, or both say what is wrong; nothing else."""

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.errors import GaplessError
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import Report, verify

COSTS = (Costs(), Costs(latency=1, bandwidth=2, boundary=1, update=1, recompute=1))

usual = st.sampled_from([Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE])
kinds = st.one_of(usual, st.sampled_from(Kind))
actions = st.builds("{}{}{}".format, st.integers(0, 3), kinds, st.integers(0, 3))
rows = st.lists(st.lists(actions, max_size=9), min_size=1, max_size=3)


@st.composite
def nearly_right(draw: st.DrawFn) -> list[list[str]]:
    """A correct schedule with an update per minibatch, of which something was changed."""
    num_stages, num_minibatches, size = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    replicas = draw(st.integers(1, 2))
    made: list[list[str]] = [[] for _ in range(num_stages * replicas)]
    for minibatch in range(num_minibatches):
        for stage in range(num_stages):
            for m in range(minibatch * size, (minibatch + 1) * size):
                made[stage * replicas + minibatch % replicas] += [f"{stage}F{m}", f"{stage}B{m}"]
            made[stage * replicas + minibatch % replicas].append(f"{stage}U{minibatch}")
    for _ in range(draw(st.integers(0, 2))):
        source, target = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        if source:
            moved = source.pop(draw(st.integers(0, len(source) - 1)))
            if draw(st.booleans()):
                target.insert(draw(st.integers(0, len(target))), moved)
    return made


def looked_at(text: str) -> Report | None:
    """None: it is refused."""
    try:
        schedule = Schedule.parse(text)
    except GaplessError:
        return None
    report: Report | None = None
    with suppress(GaplessError):
        report = verify(schedule)
        str(schedule)
        report.raise_if_wrong()
    for costs in COSTS:
        try:
            timeline = simulate(schedule, costs)
        except GaplessError:
            assert report is None or not report.ok
        else:
            assert timeline.summary()
    return report


def text_of(drawn: list[list[str]]) -> str:
    return "\n".join(f"{device}: {' '.join(row)}" for device, row in enumerate(drawn))


def updated_from_its_own_gradients(text: str) -> bool:
    """Run the rows of one stage alone, and look at what each update finds: written without the rules."""
    schedule = Schedule.parse(text)
    size = schedule.num_microbatches // schedule.num_minibatches
    for stage in range(schedule.num_stages):
        for row in schedule.rows:
            gradients: set[int] = set()
            for action in row:
                if action.stage == stage and action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD):
                    gradients.add(action.microbatch)
                elif action.stage == stage and action.kind is Kind.UPDATE:
                    wanted = set(range(action.microbatch * size, (action.microbatch + 1) * size))
                    if not gradients or not gradients <= wanted:
                        return False
                    gradients.clear()
    return True


@pytest.mark.parametrize("number", [40, pytest.param(5_000, marks=pytest.mark.slow)])
def test_random_rows_are_reported_on_or_refused(number: int) -> None:
    @settings(max_examples=number)
    @given(drawn=rows)
    def holds(drawn: list[list[str]]) -> None:
        text = text_of(drawn)
        found = looked_at(text)
        assert (looked_at(json.dumps({"rows": drawn})) is None) == (found is None)
        if found is not None and found.ok and Kind.UPDATE in found.schedule.kinds:
            assert updated_from_its_own_gradients(text)

    holds()


@pytest.mark.parametrize("number", [40, pytest.param(5_000, marks=pytest.mark.slow)])
def test_schedules_that_are_nearly_right_are_reported_on_and_updates_take_their_own_gradients(number: int) -> None:
    @settings(max_examples=number)
    @given(drawn=nearly_right())
    def holds(drawn: list[list[str]]) -> None:
        text = text_of(drawn)
        found = looked_at(text)
        if found is not None and found.ok:
            assert updated_from_its_own_gradients(text)

    holds()


@pytest.mark.parametrize("number", [20, pytest.param(2_000, marks=pytest.mark.slow)])
def test_any_text_is_read_or_refused(number: int) -> None:
    @settings(max_examples=number)
    @given(text=st.one_of(st.text(), st.text('0123456789FBIWRUSENDCV_:,\n {}[]"', max_size=60)))
    def holds(text: str) -> None:
        looked_at(text)

    holds()
