"""Recipes that go down the devices and back up, stages a = r and b = 2K-1-r on device r: zb-v, v-half, v-min,
dualpipe-v.

The first and the last stage share device 0, so the first gradient is there at once and memory is the same on every
device. Letters: K devices, M microbatches, r = device 0..K-1.
"""

from collections import Counter

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.placement import vee
from gapless.schedule.recipes.building_block import repeat_block

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD


class _Row:
    """A device's row under construction: `add("Fa", "Ib")` appends each named action for its next microbatch."""

    def __init__(self, num_devices: int, device: int, num_microbatches: int) -> None:
        self.stages = {"a": device, "b": 2 * num_devices - 1 - device}
        self.num_microbatches = num_microbatches
        self.next: Counter[str] = Counter()
        self.actions: list[Action] = []

    def left(self, name: str) -> int:
        return self.num_microbatches - self.next[name]

    def add(self, *names: str) -> None:
        for name in names:
            kind, stage = Kind(name[0]), self.stages[name[1]]
            if kind is _B:  # a whole backward counts as an I and a W
                assert self.next["I" + name[1]] == self.next["W" + name[1]], "gradients would add up out of order"
                self.next["W" + name[1]] += 1
                name = "I" + name[1]
            self.actions.append(Action(stage, kind, self.next[name]))
            self.next[name] += 1

    def below(self, num_microbatches: int) -> tuple[Action, ...]:
        return tuple(action for action in self.actions if action.microbatch < num_microbatches)


def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble in 1f1b's memory, if F, I and W cost the same.

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    K, M = num_devices, max(2 * num_devices - 1, num_microbatches)
    rows = []
    for r in range(K):
        row = _Row(K, r, M)
        row.add(*["Fa"] * (2 * (K - r) - 1))
        row.add(*["Fb", "Fa"] * r)
        row.add(*["Fb", "Ib", "Wb"] * (K - r))
        while row.left("Fa") or row.left("Fb"):
            row.add(*["Fa"] * min(1, row.left("Fa")), "Ia", "Wa", "Fb", "Ib", "Wb")
        row.add(*["Ia", "Ib"] * r)
        row.add(*["Ia", "Wa"] * (K - r))
        row.add(*["Wb"] * row.left("Wb"))
        row.add(*["Wa"] * row.left("Wa"))
        rows.append(row.below(num_microbatches))
    return Schedule(tuple(rows), vee(K), "zb-v")


def dualpipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """DualPipe folded into a V. Its blocks of a forward and a backward that may overlap are written flat, F then B.

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    K, M = num_devices, max(2 * num_devices, num_microbatches)
    rows = []
    for r in range(K):
        row = _Row(K, r, M)
        row.add(*["Fa"] * (2 * (K - r - 1)))
        row.add(*["Fa", "Fb"] * (r + 1))
        row.add(*["Ib", "Wb", "Fb"] * (K - r - 1))
        row.add(*["Fa", "Bb", "Fb", "Ba"] * (M - 2 * K + r + 1))
        row.add(*["Bb", "Fb", "Ba"] * (K - r - 1))
        held: list[str] = []  # the W that were split off and wait, in order
        for i in range(r + 1):
            for stage in "ba":
                split = i > (r + 1) // 2 or (i == (r + 1) // 2 and (stage == "a" or r % 2 == 1))
                row.add(("I" if split else "B") + stage)
                held += ["W" + stage] * split
        for _ in range(K - r - 1):
            row.add(held.pop(0), "Ia")
            held.append("Wa")
        row.add(*held)
        rows.append(row.below(num_microbatches))
    return Schedule(tuple(rows), vee(K), "dualpipe-v")


def v_half(num_devices: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """Half of 1f1b's memory, about half of its bubble.

    0: 0F0 0F1 5F0 5I0 0F2 5W0 5F1 5I1 5W1 0I0 0W0 5F2 5I2 0I1 5W2 0W1 0I2 0W2
    1: 1F0 4F0 1F1 4I0 4F1 4W0 1F2 1I0 4I1 1W0 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2
    2: 2F0 3F0 2F1 3F1 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    K = num_devices
    late = 3 if K % 2 == 0 else 0
    slots = [(2 * i, 3 * K - 2 - i, 3 * K + late - 1 + 2 * i, 6 * K + late - 2 - i) for i in range(K)]
    return repeat_block("v-half", slots, num_microbatches, (K + 2) // 2, costs)


def v_min(num_devices: int, num_microbatches: int, costs: Costs | None = None) -> Schedule:
    """A third of 1f1b's memory, about two thirds of its bubble.

    0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0I1 0W0 0W1 3F2 3I2 3W2 0I2 0W2
    1: 1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1F2 1W0 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    K = num_devices
    late = 2 if K % 3 == 0 else 0
    slots = [(i, 2 * K - 1 - i, 2 * K + late + i, 4 * K + late - 1 - i) for i in range(K)]
    return repeat_block("v-min", slots, num_microbatches, (K + 4) // 3, costs)
