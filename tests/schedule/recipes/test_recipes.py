"""What holds for every recipe, for any number of devices and microbatches; and the table of known numbers."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from inspect import getmembers, isfunction
from itertools import product
from types import ModuleType

import pytest

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.memory import peaks
from gapless.schedule.recipes import RECIPES, line, loop, make_schedule, pipedream, vee, zero_bubble
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify

SEARCHED = {"auto", "optimal"}  # these have tests of their own
NAMED = [name for name in RECIPES if name not in SEARCHED]
LOOPED = ("interleaved", "looped-bfs")
EXACT = Costs(activation=Fraction(1))


def peak_formula(name: str, K: int, M: int, v: int, r: int) -> Fraction:
    """What device r may hold, in activations of one microbatch on one device."""
    N = -(-M // max(1, M // K))  # the largest group of microbatches
    formulas: dict[str, int | Fraction] = {
        "naive": 1,
        "gpipe": M,
        "1f1b": K - r,
        "eager-1f1b": 2 * (K - r) - 1,
        "interleaved": min(Fraction(M), Fraction(2 * (K - 1) + (v - 1) * N + 1, v)),
        "looped-bfs": M,
        "zb-h1": K,
        "zb-h2": 2 * K - 1,
        "zb-v": K,
        "v-half": (K + 2) // 2,
        "v-min": (K + 4) // 3,
        "dualpipe-v": K + Fraction(1, 2),
        "pipedream": K - r,
        "2bw": K - r,
    }
    return Fraction(formulas[name])


def check_everything(name: str, K: int, M: int, v: int) -> None:
    stages_per_device = v if name in LOOPED else None
    schedule = make_schedule(name, devices=K, microbatches=M, stages_per_device=stages_per_device, minibatches=3)
    stages = {"vee": 2 * K, "loop": v * K}.get(RECIPES[name].placement, K)
    report = verify(schedule, num_microbatches=3 * M if name == "2bw" else M, num_stages=stages)
    assert report.violations == ()
    assert report.in_order
    held = peaks(schedule, EXACT)
    assert all(held[r] <= peak_formula(name, K, M, v, r) for r in range(K)), held
    for form in (schedule.text(), schedule.csv(), json.dumps(schedule.to_json())):
        parsed = Schedule.parse(form)
        assert parsed == schedule
        assert hash(parsed) == hash(schedule)


@pytest.mark.parametrize("name", NAMED)
def test_every_recipe_is_verified_complete_in_order_within_its_peak_and_round_trips(name: str) -> None:
    small = product(range(1, 6), range(1, 9), range(1, 4) if name in LOOPED else [1])
    for K, M, v in [*small, (7, 10, 4), (8, 3, 2), (9, 40, 1), (11, 23, 3), (12, 37, 2)]:
        if name != "2bw" or M >= K:
            check_everything(name, K, M, v)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMED)
def test_every_recipe_is_right_for_all_sizes_up_to_12_devices_and_40_microbatches(name: str) -> None:
    for K, M, v in product(range(1, 13), range(1, 41), range(1, 5) if name in LOOPED else [1]):
        if name != "2bw" or M >= K:
            check_everything(name, K, M, v)


@pytest.mark.parametrize(
    ("name", "makespan", "span", "peak"),
    [
        ("gpipe", 33, 33, 8),
        ("1f1b", 33, 33, 4),
        ("zb-h1", 27, 27, 4),
        ("zb-h2", 27, 24, 7),
        ("interleaved", 28.5, 28.5, 5.5),
        ("looped-bfs", 28.5, 28.5, 8),
        ("zb-v", 25.5, 24, 4),
        ("v-half", 26.5, 26.5, 3),
        ("v-min", 29.5, 29.5, 2),
        ("dualpipe-v", 25.5, 25.5, 4.5),
    ],
)
def test_the_table_for_4_devices_8_microbatches_and_unit_costs(
    name: str, makespan: float, span: float, peak: float
) -> None:
    timeline = simulate(make_schedule(name, devices=4, microbatches=8))
    assert (timeline.makespan, timeline.span, max(timeline.peak)) == (makespan, span, peak)
    assert timeline.work == 24


# -- the drawings in the docstrings -----------------------------------------------------------------------------------

_DRAWN_ROW = re.compile(r"\s*\d+: (\d+[A-Z]\d+ ?)+")


def drawn_recipes() -> list[tuple[Callable[..., Schedule], str]]:
    """Every recipe of these modules with the drawing in its docstring."""
    modules: tuple[ModuleType, ...] = (line, loop, zero_bubble, vee, pipedream)
    found: list[tuple[Callable[..., Schedule], str]] = []
    for module in modules:
        for name, function in getmembers(module, isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                rows = [row.strip() for row in (function.__doc__ or "").splitlines() if _DRAWN_ROW.fullmatch(row)]
                found.append((function, "\n".join(rows)))
    return found


@pytest.mark.parametrize(("recipe", "drawing"), drawn_recipes(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_docstring_draws_what_its_recipe_makes(recipe: Callable[..., Schedule], drawing: str) -> None:
    drawn = Schedule.parse(drawing)
    K, M = drawn.num_devices, drawn.num_microbatches
    extra: dict[str, int] = {}
    if recipe.__module__ == loop.__name__:
        extra["stages_per_device"] = drawn.num_stages // K
    if recipe is pipedream.two_buffered_weights:
        extra["minibatches"] = drawn.num_minibatches
        M //= drawn.num_minibatches
    assert recipe(K, M, **extra).text() == drawing


def test_every_named_recipe_has_a_drawing() -> None:
    assert len(drawn_recipes()) == len(NAMED)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("zbv", "did you mean zb-v?"),
        ("1F1B", "did you mean 1f1b?"),
        ("Gpipe", "did you mean gpipe?"),
        ("interleave", "did you mean interleaved?"),
        ("dualpipe", "did you mean dualpipe-v?"),
        ("!!", "`gapless schedules` lists them."),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make_schedule(name, devices=2, microbatches=2)
    assert str(caught.value) == f"there is no schedule named {name!r}; {hint}"


@pytest.mark.parametrize("word", ["devices", "microbatches", "minibatches"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_size_below_1_is_refused(word: str, value: int) -> None:
    sizes = {"devices": 2, "microbatches": 2, word: value}
    with pytest.raises(ConfigError, match=f"{word} is {value}, but a schedule needs at least 1"):
        make_schedule("1f1b", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        ("zb-v", 3, "zb-v takes 2 stages per device, not 3"),
        ("1f1b", 2, "1f1b takes 1 stage per device, not 2"),
        ("auto", 4, "auto takes 1 or 2 stages per device, not 4"),
        ("interleaved", 0, "interleaved takes at least 1 stages per device, not 0"),
    ],
)
def test_a_number_of_stages_per_device_that_does_not_fit_is_refused(name: str, asked: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_schedule(name, devices=4, microbatches=8, stages_per_device=asked)
    assert str(caught.value) == message


def test_only_pipedream_takes_replicas() -> None:
    with pytest.raises(ConfigError, match="1f1b has no replicated stages; only pipedream takes replicas"):
        make_schedule("1f1b", devices=2, microbatches=2, replicas=[1, 1])


@pytest.mark.parametrize("limit", ["x", "2y", "nanx", "inf", "-1", "0", "0x"])
def test_a_memory_limit_is_a_number_or_a_multiple(limit: str) -> None:
    with pytest.raises(ConfigError, match="memory limit"):
        make_schedule("auto", devices=2, microbatches=2, memory_limit=limit)
