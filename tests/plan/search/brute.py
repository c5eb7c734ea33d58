"""Every plan there is of a small model, one by one: what a search is held against. It shares the simulator alone, and
the named orders; costs, memory, recomputes and sums of gradients are worked out here anew.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations, product
from math import ceil, comb, perm

from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Layer, Link, Profile, Seconds
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate

STAGES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "eager-1f1b": 1, "zb-v": 2, "interleaved": 2}
MOST = 20_000


@dataclass(frozen=True)
class Case:
    profile: Profile
    devices: tuple[Device, ...]
    recipes: tuple[str, ...]
    microbatches: int
    minibatch: int
    replicas: bool

    @property
    def combinations(self) -> int:
        total, layers = 0, len(self.profile.layers)
        for recipe, K, R in self.shapes():
            stages = STAGES[recipe] * K
            total += perm(len(self.devices), R * K) * comb(layers - 1, stages - 1) * 3**stages
        return total

    def shapes(self) -> Iterator[tuple[str, int, int]]:
        """(recipe, devices of a pipeline, pipelines)"""
        for K in range(1, len(self.devices) + 1):
            for R in range(1, len(self.devices) // K + 1) if self.replicas else (1,):
                enough = self.microbatches <= ceil(self.minibatch / R)
                for recipe in self.recipes if K > 1 else ("1f1b",):
                    if STAGES[recipe] * K <= len(self.profile.layers) and enough:
                        yield recipe, K, R


def some_case(chance: random.Random) -> Case:
    """With at most `MOST` combinations."""
    while True:
        K, L = chance.randint(1, 4), chance.randint(2, 8)
        layers = []
        for number in range(L):
            times = [Seconds(chance.choice((1.0, 1.0, 2.0, 3.0, 7.0))) for _ in range(3)]
            size = chance.choice((0, 1, 2, 5))
            layers.append(
                Layer(
                    name=str(number),
                    forward=times[0],
                    input_grad=times[1],
                    weight_grad=times[2],
                    recompute=times[0],
                    parameters=chance.choice((0, 1, 4)),
                    gradients=chance.choice((0, 1, 4)),
                    optimizer_state=0,
                    activation=size,
                    kept_for_weight_grad=size,
                    boundary=0,
                )
            )
        profile = Profile("", tuple(layers), (Link("link", None, chance.choice((0.0, 0.5)), 4.0),), slack=0.0)
        uneven = chance.random() < 0.5
        memory = chance.choice((None, chance.randint(8, 60)))
        devices = tuple(
            Device(
                None if memory is None else memory + (chance.randint(0, 20) if uneven else 0),
                chance.choice((1.0, 0.5, 2.0)) if uneven else 1.0,
            )
            for _ in range(K)
        )
        recipes = tuple(chance.sample(sorted(STAGES), chance.randint(1, 2)))
        M = chance.choice((1, 2, 3, 4, 6))
        case = Case(profile, devices, recipes, M, M * chance.choice((1, 2, 4)), chance.random() < 0.5)
        if 0 < case.combinations <= MOST:
            return case


def best_of_all(case: Case) -> float | None:
    """The shortest step; None where nothing fits."""
    steps = [step for recipe, K, R in case.shapes() for step in _steps(case, recipe, K, R)]
    return min(steps, default=None)


def _steps(case: Case, recipe: str, K: int, R: int) -> Iterator[float]:
    share = ceil(case.minibatch / R)
    samples = ceil(share / case.microbatches)
    profile = case.profile.scaled(samples)
    plain = make_schedule(recipe, devices=K, microbatches=case.microbatches, stages_per_device=STAGES[recipe])
    stages = plain.num_stages
    orders = set()
    for chosen in permutations(range(len(case.devices)), R * K):
        orders.add(tuple(tuple(sorted(map(_kind, (case.devices[n] for n in chosen[p::K])))) for p in range(K)))
    for order in sorted(orders):
        speeds = [min(speed for _, speed in group) for group in order]
        limits = [min(memory for memory, _ in group) for group in order]
        for cuts in combinations(range(1, len(profile.layers)), stages - 1):
            parts = [profile.layers[a:b] for a, b in pairwise((0, *cuts, len(profile.layers)))]
            for remat in product(("none", "stage", "layer"), repeat=stages):
                schedule = _recomputed(plain, remat)
                if all(held <= limit for held, limit in zip(_held(schedule, parts, remat), limits, strict=True)):
                    yield _step(case, schedule, parts, remat, speeds, R)


def _kind(device: Device) -> tuple[float, float]:
    return (float("inf") if device.memory is None else device.memory, device.speed)


def _recomputed(plain: Schedule, remat: tuple[str, ...]) -> Schedule:
    rows = []
    for row in plain.rows:
        made: list[Action] = []
        for action in row:
            stage, kind, microbatch = action
            back = kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and remat[stage] == "stage"
            if back and made[-1] != Action(stage, Kind.FORWARD, microbatch):
                made.append(Action(stage, Kind.RECOMPUTE, microbatch))
            made.append(action)
        rows.append(made)
    return Schedule.of(rows)


def _held(schedule: Schedule, parts: list[tuple[Layer, ...]], remat: tuple[str, ...]) -> list[float]:
    """Of each device at its peak: what is always there, and what actions leave behind. Inputs take nothing here."""
    again = {(a.stage, a.microbatch) for a in schedule.actions if a.kind is Kind.RECOMPUTE}
    found = []
    for device, row in enumerate(schedule.rows):
        own = [layer for stage in schedule.placement.stages[device] for layer in parts[stage]]
        now = most = 0.0
        for stage, kind, microbatch in row:
            size = float(sum(layer.activation for layer in parts[stage]))
            one = float(max(layer.activation for layer in parts[stage]))
            by_layer, anew = remat[stage] == "layer", (stage, microbatch) in again
            for_a_while = 0.0
            if kind is Kind.FORWARD:
                for_a_while = one if by_layer else size if anew else 0.0
                now += 0.0 if by_layer or anew else size
            elif kind is Kind.RECOMPUTE:
                now += size
            elif by_layer and kind is Kind.INPUT_GRAD:
                for_a_while = size  # the layer that runs, and what W of those behind it needs: at the first one all
            elif by_layer and kind is Kind.BACKWARD:
                for_a_while = one
            most = max(most, now + for_a_while)
            if kind is Kind.INPUT_GRAD:
                now += size if by_layer else 0.0
            elif kind in (Kind.WEIGHT_GRAD, Kind.BACKWARD) and not (by_layer and kind is Kind.BACKWARD):
                now -= size
        found.append(sum(layer.parameters + layer.gradients for layer in own) + most)
    return found


def _step(
    case: Case, schedule: Schedule, parts: list[tuple[Layer, ...]], remat: tuple[str, ...], speeds: list[float], R: int
) -> float:
    homes = schedule.placement.homes
    extra = [remat[s] == "layer" for s in range(len(parts))]

    def time(name: str, stage: int) -> float:
        return sum(float(getattr(layer, name).median) for layer in parts[stage]) / speeds[homes[stage]]

    numbers = range(len(parts))
    costs = Costs(
        forward=[time("forward", s) for s in numbers],
        input_grad=[time("input_grad", s) + extra[s] * time("recompute", s) for s in numbers],
        weight_grad=[time("weight_grad", s) for s in numbers],
        recompute=[time("recompute", s) for s in numbers],
        latency=case.profile.links[0].latency,
    )
    timeline = simulate(schedule, costs)
    end = float(timeline.makespan)
    link = case.profile.links[0]
    for device in range(schedule.num_devices) if R > 1 else ():
        done = 0.0
        ends = {action.stage: float(stop) for action, _, stop in timeline.spans(device)}
        for stage, stop in sorted(ends.items(), key=lambda pair: pair[1]):
            size = sum(layer.gradients for layer in parts[stage])
            each = size / R / (link.bandwidth or 1.0) + link.latency
            done = max(done, stop) + (2 * (R - 1) * each if size else 0.0)
        end = max(end, done)
    return end
