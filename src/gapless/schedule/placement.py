"""Which device holds which stage.

A stage usually lives on one device. A replicated stage lives on several, which take its microbatches in turn. Both are
one thing here: per stage a *cycle* of devices, microbatch m running on entry m mod its length.

    line(3)        loop(2, 2)          vee(2)              replicated([2, 1])
    stage  0 1 2   stage  0 1 2 3      stage  0 1 2 3      stage  0    1
    device 0 1 2   device 0 1 0 1      device 0 1 1 0      device 0,1  2
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from gapless.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """(stage, microbatch) -> device."""

    num_devices: int
    cycles: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for stage, cycle in enumerate(self.cycles):
            if not cycle or not all(0 <= device < self.num_devices for device in cycle):
                raise ScheduleError(
                    f"stage {stage} is placed on {list(cycle)}, but the devices are 0 to {self.num_devices - 1}"
                )

    @property
    def num_stages(self) -> int:
        return len(self.cycles)

    @cached_property
    def single(self) -> tuple[int, ...] | None:
        """The device of each stage where no stage is replicated: the quick path of everything that asks often."""
        return self.homes if all(len(cycle) == 1 for cycle in self.cycles) else None

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The device of each stage, and of its first microbatch where stages are replicated."""
        return tuple(cycle[0] for cycle in self.cycles)

    def device(self, stage: int, microbatch: int) -> int:
        if self.single is not None:
            return self.single[stage]
        cycle = self.cycles[stage]
        return cycle[microbatch % len(cycle)]

    @cached_property
    def crossed(self) -> frozenset[int]:
        """The stages that take their input from another device, of all microbatches or of some."""
        pairs = enumerate(pairwise(self.cycles), start=1)
        return frozenset(stage for stage, (before, own) in pairs if len({*before, *own}) > 1)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages each device holds, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_devices)]
        for stage, cycle in enumerate(self.cycles):
            for device in sorted(set(cycle)):
                held[device].append(stage)
        return tuple(tuple(stages) for stages in held)

    def share(self, stage: int) -> int:
        """How many stages the fullest device of this stage holds: a cost given per device is divided by it."""
        return max(len(self.stages[device]) for device in self.cycles[stage])

    @property
    def shape(self) -> str:
        """`line`, `loop`, `vee`, `replicated`, or `explicit` for anything else."""
        K, S = self.num_devices, self.num_stages
        shapes = {"line": line(K), "vee": vee(K), "loop": loop(K, S // max(1, K))}
        shapes["replicated"] = replicated([len(cycle) for cycle in self.cycles])
        return next((name for name, other in shapes.items() if self == other), "explicit")

    def within(self, num_microbatches: int) -> "Placement":
        """The same placement written in the shortest way that says where the given microbatches run."""
        if self.single is not None:
            return self
        return Placement(self.num_devices, tuple(_shortest(cycle, num_microbatches) for cycle in self.cycles))


def line(num_devices: int) -> Placement:
    """Stage s on device s."""
    return Placement(num_devices, tuple((device,) for device in range(num_devices)))


def loop(num_devices: int, stages_per_device: int) -> Placement:
    """Stage s on device s mod K."""
    return Placement(num_devices, tuple((stage % num_devices,) for stage in range(num_devices * stages_per_device)))


def vee(num_devices: int) -> Placement:
    """Stages r and 2K-1-r on device r: down the devices and back up."""
    return Placement(num_devices, tuple((device,) for device in [*range(num_devices), *reversed(range(num_devices))]))


def replicated(replicas: Sequence[int]) -> Placement:
    """Stage s on as many devices of its own as `replicas[s]` says."""
    ends = list(accumulate(replicas, initial=0))
    return Placement(ends[-1], tuple(tuple(range(first, end)) for first, end in pairwise(ends)))


def explicit(num_devices: int, devices: Iterable[Iterable[int]]) -> Placement:
    """Any placement: for each stage the devices of microbatches 0, 1, 2, ..., repeated when they run out."""
    return Placement(num_devices, tuple(_shortest(tuple(cycle)) for cycle in devices))


def _shortest(cycle: tuple[int, ...], num_microbatches: int | None = None) -> tuple[int, ...]:
    """The shortest cycle that places microbatches 0 to `num_microbatches` - 1 (None: all there are) as `cycle` does."""
    if num_microbatches is not None:
        cycle = tuple(cycle[m % len(cycle)] for m in range(max(1, num_microbatches)))
    for period in range(1, len(cycle)):
        fits = num_microbatches is not None or len(cycle) % period == 0
        if fits and all(cycle[m] == cycle[m - period] for m in range(period, len(cycle))):
            return cycle[:period]
    return cycle
