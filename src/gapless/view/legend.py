"""The words and colours of actions, once for every drawing.

A kind has a hue. Within it, microbatches cycle through eight steps so that the eye can follow one across the devices,
and the stages of one device go from full to pale. All fills are light enough for one dark ink, on light and dark pages.
"""

from dataclasses import dataclass
from functools import cache

from gapless.schedule.action import PER_MINIBATCH, Action, Kind, Schedule

INK = "#0f1729"
NUM_STEPS = 8  # of microbatches
NUM_TINTS = 4  # of a device's stages


@dataclass(frozen=True)
class Term:
    """How one kind of action is called, explained and coloured."""

    name: str
    meaning: str
    colour: str


ENTRIES: dict[Kind, Term] = {
    Kind.FORWARD: Term("forward", "computes a stage's output and keeps its activations for the backward", "#6f9cf0"),
    Kind.BACKWARD: Term("backward", "both gradients in one go: that of the input and that of the weights", "#f0826f"),
    Kind.INPUT_GRAD: Term("input gradient", "the half of a backward that the previous stage waits for", "#f6ac55"),
    Kind.WEIGHT_GRAD: Term("weight gradient", "the half of a backward that nobody waits for: it fills gaps", "#57c39b"),
    Kind.RECOMPUTE: Term("recompute", "the forward again, where its activations were discarded", "#b394f2"),
    Kind.OFFLOAD: Term(
        "offload", "copies the activations to the host's memory, beside what the device does", "#7cc4d8"
    ),
    Kind.LOAD: Term("load", "brings them back before the backward needs them", "#c9b458"),
    Kind.UPDATE: Term("update", "the optimizer's step of one stage for one minibatch", "#96a3b8"),
    Kind.VERDICT: Term(
        "verdict", "waits for all updates of the minibatch before: they stand, or are undone", "#c9b458"
    ),
    Kind.SEND_ACTIVATION: Term("send activation", "sends the output to the device of the next stage", "#d79bc4"),
    Kind.RECEIVE_ACTIVATION: Term("receive activation", "prepares to receive the previous stage's output", "#d79bc4"),
    Kind.SEND_GRADIENT: Term("send gradient", "sends the gradient to the device of the previous stage", "#d79bc4"),
    Kind.RECEIVE_GRADIENT: Term("receive gradient", "prepares to receive the next stage's gradient", "#d79bc4"),
}
KINDS = tuple(ENTRIES)


def describe(action: Action) -> str:
    """`2F0: stage 2, forward, microbatch 0`."""
    return f"{action}: stage {action.stage}, {ENTRIES[action.kind].name}, {counted(action.kind)} {action.microbatch}"


def counted(kind: Kind) -> str:
    """What the last number of an action counts."""
    return "minibatch" if kind in PER_MINIBATCH else "microbatch"


def present(schedules: list[Schedule]) -> list[Kind]:
    """The kinds that occur, transfers last, in the order of the legend."""
    found = frozenset[Kind]().union(*(schedule.kinds for schedule in schedules))
    return [kind for kind in KINDS if kind in found]


def tints(schedule: Schedule) -> list[list[int]]:
    """Per device the tint of each of its stages, spread over the tints there are."""
    lasts = [len(stages) - 1 for stages in schedule.placement.stages]
    return [[round(place * min(last, NUM_TINTS - 1) / max(1, last)) for place in range(last + 1)] for last in lasts]


@cache
def shade(kind: Kind, tint: int, step: int, dark: bool) -> str:
    """The fill of an action: `tint` says which of its device's stages, `step` its microbatch modulo NUM_STEPS."""
    colour = ENTRIES[kind].colour
    if dark:
        colour = _mixed(colour, "#000000", 0.06)
    colour = _mixed(colour, "#ffffff", 0.22 * step / (NUM_STEPS - 1))
    return _mixed(colour, "#ffffff", (0.0, 0.42, 0.58, 0.7)[tint])


def _mixed(colour: str, other: str, share: float) -> str:
    parts = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(a + (b - a) * share) for a, b in parts).hex()
