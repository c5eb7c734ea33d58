"""What actions cost: time, bytes held, and what a hop between devices takes."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from operator import add, itemgetter
from typing import Any

from gapless.errors import ConfigError
from gapless.schedule.action import COPIES, TRANSFERS, Kind
from gapless.schedule.placement import Placement
from gapless.units import show_count

Number = int | float | Fraction
PerStage = Number | Sequence[Number]

_SINGLE = ("latency", "bandwidth", "host_bandwidth", "host_latency", "host_share")
_MOST = 1e100  # sums of costs stay finite


@dataclass(frozen=True)
class Costs:
    """What actions cost, in any unit of time and any unit of memory. A single number is the cost of one microbatch on
    one device, and the stages of a device share it. A list has one number per stage.

    forward               time of a forward (F)
    input_grad            time of an input gradient (I)
    weight_grad           time of a weight gradient (W)
    backward              time of a whole backward (B); I and W together unless given
    recompute             time of a recompute (R), with remat
    update                time of an optimizer step
    latency               time of a hop between devices, whatever its size
    bandwidth             of a link: units of memory per unit of time; no limit unless given
    activation            memory that F keeps until its W or B has ended
    kept_for_weight_grad  the part of it that stays between I and W; all of it unless given
    boundary              memory sent from one stage to the next, which is all that a recomputed stage keeps. A single
                          number applies to every stage, since more cuts do not make a boundary smaller
    host_bandwidth        of the link between a device and its host, each way, for offload; no limit unless given
    host_latency          time of a copy there, whatever its size
    host_share            how many devices share such a link: 0 to n - 1, n to 2 n - 1, and so on
    offloaded             memory that an O copies to the host; by default all that waits there
    """

    forward: PerStage = 1
    input_grad: PerStage = 1
    weight_grad: PerStage = 1
    recompute: PerStage = 0
    update: PerStage = 0
    latency: Number = 0
    bandwidth: Number | None = None
    activation: PerStage = 1
    kept_for_weight_grad: PerStage | None = None
    boundary: PerStage = 0
    backward: PerStage | None = None
    host_bandwidth: Number | None = None
    host_latency: Number = 0
    host_share: Number = 1
    offloaded: PerStage | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            listed = isinstance(value, Sequence) and not isinstance(value, str)
            if listed:
                if field.name in _SINGLE:
                    raise ConfigError(f"{field.name} takes one number, not a list of {len(value)}")
                object.__setattr__(self, field.name, tuple(value))
            for number in value if listed else () if value is None else (value,):
                if isinstance(number, bool) or not isinstance(number, Number) or not 0 <= number <= _MOST:
                    raise ConfigError(f"{field.name} is {number!r:.40}, but a cost is a number from 0 to {_MOST:g}")
        for name in ("bandwidth", "host_bandwidth"):
            if (value := getattr(self, name)) is not None and value < 1 / _MOST:
                raise ConfigError(
                    f"{name} is {value}, so nothing would ever arrive; leave it out for links without a limit"
                )
        if self.host_share < 1 or self.host_share != int(self.host_share):
            raise ConfigError(f"host_share is {self.host_share!r}, but it counts the devices that share a link")

    def per_stage(self, name: str, placement: Placement) -> tuple[Number, ...]:
        """The cost `name` of every stage of `placement`. No more is kept for a W than there is."""
        value = getattr(self, name)
        if name == "kept_for_weight_grad":
            held = self.per_stage("activation", placement)
            return held if value is None else tuple(map(min, self._spread(name, value, placement), held))
        return self._spread(name, value, placement)

    def _spread(self, name: str, value: Any, placement: Placement) -> tuple[Number, ...]:
        stages = placement.num_stages
        if isinstance(value, tuple):
            if len(value) != stages:
                raise ConfigError(f"{name} lists {show_count(len(value), 'stage')}, but the schedule has {stages}")
            return value
        if name == "boundary":
            return (value,) * stages
        shares = map(placement.share, range(stages))
        return tuple(value if share == 1 else value / share for share in shares)

    def durations(self, placement: Placement) -> dict[Kind, tuple[Number, ...]]:
        """How long each kind of action takes on each stage. Transfers and copies take no time of a device."""
        inputs, weights = self.per_stage("input_grad", placement), self.per_stage("weight_grad", placement)
        both = tuple(map(add, inputs, weights))
        return {
            Kind.FORWARD: self.per_stage("forward", placement),
            Kind.INPUT_GRAD: inputs,
            Kind.WEIGHT_GRAD: weights,
            Kind.BACKWARD: self.per_stage("backward", placement) if self.backward is not None else both,
            Kind.RECOMPUTE: self.per_stage("recompute", placement),
            Kind.UPDATE: self.per_stage("update", placement),
            **dict.fromkeys(TRANSFERS | COPIES | {Kind.VERDICT}, (0,) * placement.num_stages),
        }

    def transits(self, placement: Placement) -> tuple[Number, ...]:
        """How long a link is busy with what goes to each stage from the one before, or back: both have the size of the
        stage's input.
        """
        sizes = self.per_stage("boundary", placement)
        return (0,) * len(sizes) if self.bandwidth is None else tuple(size / self.bandwidth for size in sizes)

    def copy_time(self, size: Number) -> Number:
        """How long a copy of this size occupies the link to the host."""
        return self.host_latency + (0 if self.host_bandwidth is None else size / self.host_bandwidth)

    def hops(self, placement: Placement) -> tuple[Number, ...]:
        """What it takes to each stage from the one before, or back, where the link is free: nothing on one device."""
        transits = enumerate(self.transits(placement))
        return tuple(self.latency + transit if stage in placement.crossed else 0 for stage, transit in transits)

    def recomputed_late(self, placement: Placement) -> "Costs":
        """The same work with the recompute inside the backward, where it waits for the gradient as torch's
        checkpoint does.
        """
        times = self.durations(placement)
        inputs, whole = (
            tuple(map(add, times[kind], times[Kind.RECOMPUTE])) for kind in (Kind.INPUT_GRAD, Kind.BACKWARD)
        )
        return replace(self, input_grad=inputs, backward=whole, recompute=0)

    def merged(self, num_stages: int) -> "Costs":
        """The costs of `num_stages` stages, each made of as many consecutive ones of these."""
        changes: dict[str, tuple[Number, ...]] = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple) and len(value) != num_stages and len(value) % num_stages == 0:
                run = len(value) // num_stages
                merge = sum if name != "boundary" else itemgetter(0)  # what comes into the first comes into all
                changes[name] = tuple(merge(value[i : i + run]) for i in range(0, len(value), run))
        return replace(self, **changes) if changes else self  # type: ignore[arg-type]
