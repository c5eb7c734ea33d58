"""The schedule for *these* costs and *this* memory: several greedy passes and every named recipe, judged by the simulator."""

import math
from collections.abc import Callable, Iterator
from typing import Literal

from gapless.errors import ConfigError, ScheduleError
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs, Number
from gapless.schedule.memory import peaks
from gapless.schedule.placement import Placement
from gapless.schedule.placement import line as line_placement
from gapless.schedule.placement import vee as vee_placement
from gapless.schedule.recipes import line, vee, zero_bubble
from gapless.schedule.recipes.greedy import Policy, greedy
from gapless.schedule.simulate import simulate

Objective = Literal["makespan", "span"]

_POLICIES = tuple(
    Policy(patience, head_start, backlog)
    for patience in (0.0, 0.5, 1.0)
    for head_start, backlog in ((None, None), (2.0, None), (1.5, None), (1.0, None), (None, 1), (2.0, 1))
)


def auto(
    num_devices: int,
    num_microbatches: int,
    costs: Costs,
    *,
    stages_per_device: int | None = None,
    memory_limit: Number | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """The best schedule found: 1 stage per device is a line, 2 are a vee, None tries both where the costs allow."""
    best: tuple[tuple[Number, Number], Schedule] | None = None
    least: Number = math.inf
    for placement in _placements(num_devices, costs, stages_per_device):
        for schedule in _candidates(placement, num_microbatches, costs, memory_limit):
            peak = max(peaks(schedule, costs))
            least = min(least, peak)
            if memory_limit is not None and peak > memory_limit:
                continue
            timeline = simulate(schedule, costs)
            value = (
                (timeline.makespan, timeline.span) if objective == "makespan" else (timeline.span, timeline.makespan)
            )
            if best is None or value < best[0]:
                best = (value, schedule)
    if best is None:
        raise ScheduleError(
            f"no schedule of {num_devices} devices and {num_microbatches} microbatches fits a memory limit of "
            f"{_shown(memory_limit)}: the smallest peak found is {_shown(least)}"
        )
    return best[1].renamed("auto")


def _placements(K: int, costs: Costs, stages_per_device: int | None) -> Iterator[Placement]:
    lengths = {len(value) for value in vars(costs).values() if isinstance(value, tuple)}
    if stages_per_device in (None, 1) and (stages_per_device == 1 or lengths <= {K}):
        yield line_placement(K)
    if stages_per_device in (None, 2) and (stages_per_device == 2 or lengths <= {2 * K}):
        yield vee_placement(K)
    if stages_per_device is None and not (lengths <= {K} or lengths <= {2 * K}):
        raise ConfigError(f"costs list {sorted(lengths)} stages, but auto places {K} in a line or {2 * K} in a vee")


def _candidates(placement: Placement, M: int, costs: Costs, limit: Number | None) -> Iterator[Schedule]:
    K = placement.num_devices
    for recipe in _named(placement, costs):
        yield recipe(K, M)
    for policy in _POLICIES:
        schedule = greedy(placement, M, costs, limit, policy)
        if schedule is not None:
            yield schedule


def _named(placement: Placement, costs: Costs) -> list[Callable[[int, int], Schedule]]:
    if placement.num_stages == placement.num_devices:
        return [
            line.naive,
            line.gpipe,
            line.one_forward_one_backward,
            line.eager_one_forward_one_backward,
            zero_bubble.zb_h1,
            zero_bubble.zb_h2,
        ]
    return [
        vee.zb_v,
        vee.dualpipe_v,
        lambda K, M: vee.v_half(K, M, costs),
        lambda K, M: vee.v_min(K, M, costs),
    ]


def resolve_limit(limit: Number | str | None, num_devices: int, num_microbatches: int, costs: Costs) -> Number | None:
    """A limit in the unit of `activation`; "2x" is twice the peak of 1f1b with these costs."""
    if isinstance(limit, str):
        text = limit.strip()
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            raise ConfigError(
                f"memory limit {limit[:40]!r} is neither a number nor a multiple of 1f1b's peak such as 2x"
            ) from None
        if not text.endswith("x"):
            return resolve_limit(value, num_devices, num_microbatches, costs)
        value = _checked(value)
        schedule = line.one_forward_one_backward(num_devices, num_microbatches)
        return value * max(peaks(schedule, costs.merged(num_devices)))
    return None if limit is None else _checked(limit)


def _checked(limit: Number) -> Number:
    if not math.isfinite(limit) or limit <= 0:
        raise ConfigError(f"memory limit is {_shown(limit)}, but it must be a number above 0")
    return limit


def _shown(number: Number | None) -> str:
    return f"{float(number):g}" if number is not None else "none"
