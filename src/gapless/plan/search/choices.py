"""What a search chooses from: pipelines and replicas, microbatches, recipes and stages per device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

from gapless.errors import ConfigError
from gapless.plan.profile.machine import Device, Mesh
from gapless.plan.profile.profile import Link
from gapless.schedule.placement import Placement, line, loop, vee
from gapless.schedule.recipes import find_recipe
from gapless.units import show_count

RECIPES = (
    "1f1b",
    "gpipe",
    "eager-1f1b",
    "zb-h1",
    "zb-h2",
    "interleaved",
    "looped-bfs",
    "zb-v",
    "dualpipe-v",
    "v-half",
    "v-min",
)
"""Those with a flush, which is what a Pipeline runs. `auto` comes on top, where the others do best."""

_MOST_STAGES_PER_DEVICE = 4
MOST_MICROBATCHES = 1024
_ALL_SIZES = 64  # samples up to which every size of microbatches is a choice
_MOST_ORDERS = 24  # of unlike devices
_MOST_MACHINES = 4096


@dataclass(frozen=True)
class Choice:
    """One of the many that are tried: a recipe on a mesh, with so many microbatches."""

    recipe: str
    stages_per_device: int
    mesh: Mesh
    microbatches: int
    samples: int  # in a microbatch

    @property
    def placement(self) -> Placement:
        K = self.mesh.num_devices
        if self.stages_per_device == 1:
            return line(K)
        if find_recipe(self.recipe).placement == "loop":
            return loop(K, self.stages_per_device)
        return vee(K)

    @property
    def sizes(self) -> dict[str, Any]:
        """As `make_schedule` takes them."""
        K, v = self.mesh.num_devices, self.stages_per_device
        return {"devices": K, "microbatches": self.microbatches, "stages_per_device": v}

    @property
    def num_actions(self) -> int:
        """About how many its schedule has."""
        return 3 * self.mesh.num_devices * self.stages_per_device * self.microbatches

    @property
    def share(self) -> int:
        """Samples of one pipeline, had all microbatches as many as the largest."""
        return self.microbatches * self.samples

    def __str__(self) -> str:
        replicas = f"{self.mesh.replicas} x " if self.mesh.replicas > 1 else ""
        devices = f"{replicas}{show_count(self.mesh.num_devices, 'device')}"
        stages = f", {self.stages_per_device} stages each" if self.stages_per_device > 1 else ""
        return f"{self.recipe} on {devices}{stages}, {show_count(self.microbatches, 'microbatch')} of {self.samples}"


def machines(devices: Sequence[Device]) -> list[tuple[int, ...]]:
    """Every choice of devices, the most first: leaving some idle is a plan, too. Of devices that are alike the first
    are taken, so that what there is to choose from only grows with the devices.
    """
    if every_machine(devices):
        kinds = _kinds(devices)
        counts = product(*(range(len(numbers), -1, -1) for numbers in kinds))
        found = [[x for n, k in zip(kinds, each, strict=True) for x in n[:k]] for each in counts]
    else:  # the slowest, or the smallest, are left out
        by_speed = sorted(range(len(devices)), key=lambda number: -devices[number].speed)
        by_memory = sorted(by_speed, key=lambda number: -_memory(devices[number]))
        found = [order[:count] for order in (by_speed, by_memory) for count in range(1, len(order) + 1)]
    return sorted({tuple(sorted(one)) for one in found if one}, key=lambda one: (-len(one), one))


def every_machine(devices: Sequence[Device]) -> bool:
    """Whether all choices of devices are tried: only some are, where there are many kinds."""
    return math.prod(len(numbers) + 1 for numbers in _kinds(devices)) <= _MOST_MACHINES


def _kinds(devices: Sequence[Device]) -> list[list[int]]:
    """The numbers of the devices of each kind."""
    kinds: dict[Device, list[int]] = {}
    for number, device in enumerate(devices):
        kinds.setdefault(device, []).append(number)
    return list(kinds.values())


def _memory(device: Device) -> float:
    return math.inf if device.memory is None else device.memory


def meshes(machine: Sequence[int], devices: Sequence[Device], *, replicas: bool, links: Sequence[Link]) -> list[Mesh]:
    """Every way to use all devices of the machine, the longest pipeline first, and for unlike devices several orders.
    Replicas of a stage are devices that are as alike as possible: the stage is as quick as its slowest replica. Where
    links differ, they are the devices too that it has where all are alike: a pipeline of neighbours, or replicas.
    """
    found = []
    near = not links or links[0].devices is None or len({number // links[0].devices for number in machine}) == 1
    for K in range(len(machine), 0, -1):
        R, left = divmod(len(machine), K)
        if left or (R > 1 and not replicas):
            continue
        pipelines = tuple(tuple(machine[position::K]) for position in range(K))
        neighbours = _rows(machine, R)
        given = list(dict.fromkeys((pipelines,) if near else (pipelines, neighbours)))
        alike = len({devices[number] for number in machine}) == 1
        others = [] if alike else _orders(machine, devices, R)
        for groups in dict.fromkeys((*others, *(given if alike or not near else ()))):
            inside = groups == neighbours != pipelines and not near
            placed = tuple(number for part in (groups if inside else zip(*groups, strict=True)) for number in part)
            found.append(Mesh(R, K, inside, () if placed == tuple(range(len(machine))) else placed))
    return list(dict.fromkeys(found))


_Groups = tuple[tuple[int, ...], ...]  # the replicas of each stage


def _rows(order: Sequence[int], R: int) -> _Groups:
    return tuple(tuple(order[at : at + R]) for at in range(0, len(order), R))


def _orders(machine: Sequence[int], devices: Sequence[Device], R: int) -> list[_Groups]:
    """Those of unlike devices that differ in what their stages have."""

    def kind(number: int) -> tuple[float, float]:
        return _memory(devices[number]), devices[number].speed

    if every_order(machine, devices):
        sorts: list[Sequence[int]] = [machine, *permutations(machine)]
    else:
        by_memory = sorted(machine, key=lambda number: (kind(number), number))
        by_speed = sorted(machine, key=lambda number: (devices[number].speed, kind(number), number))
        sorts = [by_memory, by_memory[::-1], by_speed, by_speed[::-1], machine]
    different: dict[tuple[Any, ...], _Groups] = {}
    for row in (_rows(order, R) for order in sorts):
        different.setdefault(tuple(tuple(sorted(map(kind, group))) for group in row), row)
    return list(different.values())


def every_order(machine: Sequence[int], devices: Sequence[Device]) -> bool:
    """Whether all orders of these devices are choices: only some are, where there are many."""
    return len({devices[number] for number in machine}) == 1 or math.perm(len(machine)) <= _MOST_ORDERS


def microbatches(mesh: Mesh, minibatch: int, asked: int | None = None) -> list[tuple[int, int]]:
    """(M, samples in each) for the share of one replica, the smallest first. Where the samples can't be shared out
    evenly, this is the largest share, of which the last microbatches may be smaller.
    """
    if mesh.replicas > minibatch:
        return []
    share = math.ceil(minibatch / mesh.replicas)
    if asked is not None:
        return [(asked, math.ceil(share / asked))] if asked <= share else []
    sizes: Sequence[int] = range(1, share + 1)
    if share > _ALL_SIZES:  # 1, 2, 4, 8, ..., and all of them
        powers = {2**n for n in range(share.bit_length()) if 2**n <= share}
        sizes = sorted(powers | {share})
    least: dict[int, int] = {}  # by the number of microbatches
    for size in sizes:
        least.setdefault(math.ceil(share / size), size)
    return [(M, size) for M, size in least.items() if M <= MOST_MICROBATCHES]


def choices(
    counts: Mapping[Mesh, Sequence[tuple[int, int]]], recipes: Sequence[str], num_layers: int
) -> Iterator[Choice]:
    """For each mesh with its numbers of microbatches; only those that have a layer for each stage."""
    for mesh, pairs in counts.items():
        for M, samples in pairs:
            if mesh.num_devices == 1:  # all schedules are the same here, and this one holds least
                yield Choice("1f1b", 1, mesh, M, samples)
                continue
            for recipe in recipes:
                for stages_per_device in _stages_per_device(recipe, mesh.num_devices, num_layers):
                    if mesh.num_devices * stages_per_device <= num_layers:
                        yield Choice(recipe, stages_per_device, mesh, M, samples)


def _stages_per_device(recipe: str, num_devices: int, num_layers: int) -> list[int]:
    taken = find_recipe(recipe).stages_per_device
    if taken is not None:
        return list(taken)
    most = min(_MOST_STAGES_PER_DEVICE, max(2, num_layers // num_devices))
    return list(range(2, most + 1))


def check_recipes(recipes: Sequence[str]) -> None:
    """Raises where one of them has no flush, or takes too long to be tried among others."""
    for name in recipes:
        recipe = find_recipe(name)
        if not recipe.synchronous or name in ("optimal", "naive"):
            reason = "it has no flush" if not recipe.synchronous else "it is too slow to be one of many"
            raise ConfigError(f"the planner can't use {name}, since {reason}; use {', '.join((*RECIPES, 'auto'))}")
