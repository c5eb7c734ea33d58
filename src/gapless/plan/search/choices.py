"""What a search chooses from: pipelines and replicas, microbatches, recipes and stages per device."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gapless.errors import ConfigError
from gapless.plan.profile.machine import Mesh
from gapless.schedule.placement import Placement, line, loop, vee
from gapless.schedule.recipes import find_recipe

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
_DEPTHS = (1, 2, 4, 8)  # microbatches per device that are tried


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
    def num_actions(self) -> int:
        """About how many its schedule has."""
        return 3 * self.mesh.num_devices * self.stages_per_device * self.microbatches

    def __str__(self) -> str:
        replicas = f"{self.mesh.replicas} x " if self.mesh.replicas > 1 else ""
        devices = f"{replicas}{self.mesh.num_devices} device{'s' if self.mesh.num_devices > 1 else ''}"
        stages = f", {self.stages_per_device} stages each" if self.stages_per_device > 1 else ""
        return f"{self.recipe} on {devices}{stages}, {self.microbatches} microbatches of {self.samples}"


def meshes(num_devices: int, *, even: bool, levels: int) -> list[Mesh]:
    """Every way to use all devices, the longest pipeline first. Uneven devices make one pipeline."""
    found = []
    for K in range(num_devices, 0, -1):
        replicas, left = divmod(num_devices, K)
        if left == 0 and (even or replicas == 1):
            found.append(Mesh(replicas, K))
            if levels > 1 and replicas > 1 and K > 1:
                found.append(Mesh(replicas, K, inside=True))
    return found


def shorter(num_devices: int) -> list[Mesh]:
    """One pipeline that leaves devices idle: for when nothing else fits the model."""
    return [Mesh(1, K) for K in range(num_devices - 1, 1, -1) if num_devices % K]


def microbatches(mesh: Mesh, minibatch: int, asked: int | None = None) -> list[tuple[int, int]]:
    """(M, samples in each) for the share of one replica, the smallest first; none where it can't be cut evenly."""
    share, left = divmod(minibatch, mesh.replicas)
    if left:
        return []
    if asked is not None:
        return [(asked, math.ceil(share / asked))] if asked <= share else []
    divisors = [M for M in range(1, min(share, MOST_MICROBATCHES) + 1) if share % M == 0]
    wanted = [depth * mesh.num_devices for depth in _DEPTHS]
    near = {min(divisors, key=lambda M: (abs(math.log(M / want)), M)) for want in wanted}
    return [(M, share // M) for M in sorted(near, reverse=True)]


def choices(
    counts: Mapping[Mesh, Sequence[tuple[int, int]]], recipes: Sequence[str], num_layers: int
) -> Iterator[Choice]:
    """For each mesh with its numbers of microbatches."""
    for mesh, pairs in counts.items():
        for M, samples in pairs:
            if mesh.num_devices == 1:  # all schedules are the same here, and this one holds least
                yield Choice("1f1b", 1, mesh, M, samples)
                continue
            for recipe in recipes:
                for stages_per_device in _stages_per_device(recipe, mesh.num_devices, num_layers):
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
