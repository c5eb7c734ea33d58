"""Copies to the host: `simulate` against a second simulator, which goes from one tick to the next by the definition."""

import random
from collections import defaultdict
from fractions import Fraction
from itertools import count
from typing import Any

import pytest

import gapless
from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.lower import add_recompute, fuse


def with_copies(rng: random.Random, schedule: Schedule) -> Schedule:
    """Some of it goes to the host, at any time, and comes back at any time before it is needed."""
    rows = []
    for row in schedule.rows:
        made = list(row)
        for stage, kind, microbatch in row:
            if kind is Kind.FORWARD and rng.random() < 0.6:
                first = made.index(Action(stage, kind, microbatch)) + 1
                last = next(
                    place
                    for place, action in enumerate(made)
                    if (action.stage, action.microbatch) == (stage, microbatch)
                    and (action.kind in BACKWARDS or action.kind is Kind.RECOMPUTE)
                )
                out = rng.randint(first, last)
                made.insert(out, Action(stage, Kind.OFFLOAD, microbatch))
                made.insert(rng.randint(out + 1, last + 1), Action(stage, Kind.LOAD, microbatch))
        rows.append(made)
    return schedule.with_rows(rows)


class Ticks:
    """Whole numbers only. Each tick: what ends, ends; devices go through their rows; links start what they can."""

    def __init__(
        self, schedule: Schedule, times: dict[str, int], latency: int, sizes: dict[str, int], share: int
    ) -> None:
        self.schedule, self.share, self.latency = schedule, share, latency
        self.times, self.sizes = times, sizes
        self.starts: dict[Action, int] = {}
        self.ends: dict[Action, int] = {}
        queues: dict[tuple[int, Kind], list[Action]] = defaultdict(list)
        position, free = [0] * schedule.num_devices, [0] * schedule.num_devices
        for now in count():
            for device, row in enumerate(schedule.rows):
                while position[device] < len(row) and free[device] <= now:
                    action = row[position[device]]
                    if action.kind in (Kind.OFFLOAD, Kind.LOAD):
                        queues[device // share, action.kind].append(action)
                    elif self._ready(action, device, now):
                        self._run(action, now)
                        free[device] = self.ends[action]
                    else:
                        break
                    position[device] += 1
            for queue in queues.values():
                running = [action for action in queue if action in self.ends and self.ends[action] > now]
                following = next((action for action in queue if action not in self.ends), None)
                if not running and following is not None and self._ready(following, -1, now):
                    self._run(following, now)
            if len(self.ends) == schedule.num_actions:
                return

    def _run(self, action: Action, now: int) -> None:
        copied = self.sizes["boundary" if self._again(action) else "activation"] * 2  # ticks for each unit of memory
        taken = copied if action.kind in (Kind.OFFLOAD, Kind.LOAD) else self.times[action.kind]
        self.starts[action], self.ends[action] = now, now + taken

    def _again(self, action: Action) -> bool:
        return any(
            a.kind is Kind.RECOMPUTE and (a.stage, a.microbatch) == (action.stage, action.microbatch)
            for a in self.schedule.actions
        )

    def _ready(self, action: Action, device: int, now: int) -> bool:
        for need in dependencies(action, self.schedule):
            maker = next((a for a in self.ends if need in completes(a)), None)
            if maker is None:
                return False
            home = self.schedule.placement.device(need.stage, need.microbatch)
            if self.ends[maker] + (self.latency if device not in (-1, home) else 0) > now:
                return False
        return True

    def held(self, device: int, host: bool, now: int) -> int:
        """In the middle of a tick: of every stage and microbatch what is there."""
        total = 0
        for stage, kind, microbatch in self.schedule.rows[device]:
            if kind is not Kind.FORWARD:
                continue
            at = {a.kind: a for a in self.ends if (a.stage, a.microbatch) == (stage, microbatch)}
            ended = self.ends[at.get(Kind.WEIGHT_GRAD) or at[Kind.BACKWARD]] <= now
            out = at.get(Kind.OFFLOAD)
            kept = self.sizes["boundary" if Kind.RECOMPUTE in at else "activation"]
            if host:
                if out is not None and self.starts[out] <= now < self.ends[at[Kind.LOAD]]:
                    total += kept
                continue
            away = out is not None and self.ends[out] <= now < self.starts[at[Kind.LOAD]]
            if self.starts[at[kind]] <= now and not ended and not away:
                total += kept
            if Kind.RECOMPUTE in at and self.starts[at[Kind.RECOMPUTE]] <= now and not ended:
                total += self.sizes["activation"]
        return total


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_two_simulators_agree(first: int) -> None:
    for seed in range(first, 4 if first == 0 else 300):
        rng = random.Random(seed)
        name = rng.choice(["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved"])
        devices = rng.randint(2, 4)
        schedule = gapless.make_schedule(name, devices=devices, microbatches=devices * rng.randint(1, 2))
        if rng.random() < 0.5:
            schedule = fuse(schedule, None)
        if rng.random() < 0.4:
            schedule = add_recompute(schedule, gapless.Costs(recompute=1))
        schedule = with_copies(rng, schedule)
        times = {kind: rng.randint(1, 5) for kind in "FIWBR"}
        sizes = {"activation": rng.randint(1, 4), "boundary": rng.randint(1, 3)}
        latency, share = rng.randint(0, 2), rng.choice([1, 1, 2, 3])
        names = {"F": "forward", "I": "input_grad", "W": "weight_grad", "B": "backward", "R": "recompute"}
        stages: dict[str, Any] = {names[kind]: [time] * schedule.num_stages for kind, time in times.items()}
        stages["activation"] = [sizes["activation"]] * schedule.num_stages
        host: dict[str, Any] = {"host_bandwidth": Fraction(1, 2), "host_share": share}
        costs = gapless.Costs(**stages, boundary=sizes["boundary"], latency=latency, **host)
        assert gapless.verify(schedule).ok
        timeline = gapless.simulate(schedule, costs)
        ticks = Ticks(schedule, times, latency, sizes, share)
        found = {action: (start, end) for action, start, end in timeline.all_spans}
        assert found == {a: (ticks.starts[a], ticks.ends[a]) for a in ticks.ends}, f"seed {seed}: {schedule}"
        last = max(ticks.ends.values())
        for device in range(devices):
            moments = range(last)
            assert timeline.peak[device] == max(ticks.held(device, False, now) for now in moments), f"seed {seed}"
            assert timeline.host_peak[device] == max(ticks.held(device, True, now) for now in moments), f"seed {seed}"


def test_a_copy_takes_no_time_of_its_device() -> None:
    schedule = Schedule.parse("0: 0F0 0O0 0L0 0F1 0B0 0B1")
    timeline = gapless.simulate(schedule, gapless.Costs(host_bandwidth=4))
    assert (timeline.makespan, timeline.busy, timeline.work) == (6, (6,), 6)
    assert gapless.simulate(schedule, gapless.Costs(host_bandwidth=0.25)).makespan == 13  # 1 + 4 + 4 to have it back
    assert Schedule.parse(str(schedule)) == schedule == Schedule.parse(schedule.csv())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0: 0F0 0O0 0B0", "0O0 is without its 0L0: its activations never come back"),
        ("0: 0F0 0L0 0B0", "0L0 is without its 0O0: nothing went to the host before"),
        ("0: 0O0 0F0 0L0 0B0", "0O0 waits for 0F0"),
        ("0: 0F0 0O0 0B0 0L0", "0B0 waits for 0L0"),
        ("0: 0F0 0L0 0O0 0B0", "0L0 waits for 0O0"),
        ("0: 0F0 0O0 0L0", "0O0 is for no backward: the schedule has none"),
        ("0: 0F0 0O0 0L0 0O0 0B0", "0O0 occurs twice"),
    ],
)
def test_what_goes_to_the_host_comes_back_before_it_is_needed(text: str, words: str) -> None:
    found = gapless.verify(Schedule.parse(text)).violations
    assert any(words in violation.message for violation in found), found


@pytest.mark.parametrize(
    "wrong", [{"host_bandwidth": 0}, {"host_latency": [1, 2]}, {"host_share": 0}, {"host_share": 1.5}]
)
def test_costs_that_can_not_be(wrong: dict[str, float]) -> None:
    with pytest.raises(gapless.errors.ConfigError, match="host_"):
        gapless.Costs(**wrong)
