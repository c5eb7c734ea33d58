"""A schedule is a value: for each device the order of its actions.

It prints as text, one line per device, and parses back exactly:

    0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

An action is written stage, letter, microbatch: `2F0` is the forward of stage 2 for microbatch 0.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from gapless.errors import ScheduleError, printable
from gapless.schedule.placement import Placement, explicit


class Kind(StrEnum):
    """What an action does. The values are the letters of the text form, which torch's CSV files share."""

    FORWARD = "F"
    BACKWARD = "B"  # the whole backward: an I and its W in one
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "R"
    OFFLOAD = "O"  # the activations go to the host's memory, beside what the device computes
    LOAD = "L"  # and come back
    UPDATE = "U"  # its number is that of the minibatch
    VERDICT = "V"  # its number is that of the minibatch that may go on: does the update before it stand?
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"

    # Enum's own hash is a Python function; schedules hash millions of actions.
    __hash__ = str.__hash__


TRANSFERS = frozenset({Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT})
COPIES = frozenset({Kind.OFFLOAD, Kind.LOAD})
OPTIONAL = TRANSFERS | COPIES | {Kind.RECOMPUTE}  # needed only where the schedule has them
PER_MINIBATCH = frozenset({Kind.UPDATE, Kind.VERDICT})  # numbered by minibatches
BACKWARDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRAD})  # the two that hand a gradient on


class Action(NamedTuple):
    """`2F0`: stage 2, forward, microbatch 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_ACTION = re.compile(r"(\d{1,9})([A-Z_]+)(\d{1,9})", re.ASCII)
_KINDS = {kind.value: kind for kind in Kind}
_ROW = re.compile(r"\s*(\d{1,9})\s*:(.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """For each device the order of its actions. Equal if the rows are equal; the name is only a label."""

    rows: tuple[tuple[Action, ...], ...]
    placement: Placement
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", self.placement.within(self.num_microbatches))

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action]], placement: Placement | None = None, name: str = "") -> "Schedule":
        """A schedule from rows alone: a stage lives where its actions are."""
        made = tuple(tuple(row) for row in rows)
        return cls(made, placement or _placement_of(made), name)

    @property
    def num_devices(self) -> int:
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def actions(self) -> Iterator[Action]:
        """All of them, device by device."""
        return chain.from_iterable(self.rows)

    @cached_property
    def num_actions(self) -> int:
        return sum(map(len, self.rows))

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max((action.microbatch for action in self.actions if action.kind not in PER_MINIBATCH), default=-1)

    @cached_property
    def num_minibatches(self) -> int:
        """How many updates each stage sees; 1 where the schedule leaves the update to the optimizer."""
        if Kind.UPDATE not in self.kinds:
            return 1
        return 1 + max(action.microbatch for action in self.actions if action.kind is Kind.UPDATE)

    @cached_property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(action.kind for action in self.actions)

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose activations are thrown away and recomputed."""
        return frozenset((a.stage, a.microbatch) for a in self.optional if a.kind is Kind.RECOMPUTE)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose activations wait in host memory."""
        return frozenset((a.stage, a.microbatch) for a in self.optional if a.kind is Kind.OFFLOAD)

    @property
    def has_transfers(self) -> bool:
        return not TRANSFERS.isdisjoint(self.kinds)

    @property
    def has_copies(self) -> bool:
        """Whether activations are copied between a device and its host."""
        return not COPIES.isdisjoint(self.kinds)

    @cached_property
    def optional(self) -> frozenset[Action]:
        """The recomputes, copies and transfers: what other schedules do without."""
        if OPTIONAL.isdisjoint(self.kinds):
            return frozenset()
        return frozenset(action for action in self.actions if action.kind in OPTIONAL)

    def renamed(self, name: str) -> "Schedule":
        return Schedule(self.rows, self.placement, name)

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> "Schedule":
        """The same placement and name with other rows: what a pass returns."""
        return Schedule(tuple(tuple(row) for row in rows), self.placement, self.name)

    # -- the text, CSV and JSON forms ---------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        return "\n".join(f"{device}: {' '.join(map(str, row))}".rstrip() for device, row in enumerate(self.rows))

    def csv(self) -> str:
        """torch's compute-only format: one line per device, with the actions only."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "schedule": self.name,
            "devices": self.num_devices,
            "stages": self.num_stages,
            "microbatches": self.num_microbatches,
            "rows": [[str(action) for action in row] for row in self.rows],
        }

    @classmethod
    def parse(cls, text: str, name: str = "") -> "Schedule":
        """Reads any of the three formats, without lines that begin with #; an error names the line and the token."""
        name = printable(name)
        text = re.sub(r"^[ \t]*#.*$", "#", text, flags=re.MULTILINE)  # a line stays, so that others keep their numbers
        stripped = text.lstrip("# \t\r\n")
        if not stripped:
            raise ScheduleError("the schedule is empty: it needs one line per device, as in `0: 0F0 0B0`")
        if stripped[0] == "{":
            return _parse_json(re.sub(r"^#$", "", text, flags=re.MULTILINE), name)
        if _ROW.match(stripped.split("\n", 1)[0]):
            return cls.of(_parse_text(text), name=name)
        return cls.of(_parse_csv(text), name=name)


def check_schedule(schedule: object, call: str) -> None:
    """It is one, and not its name."""
    if isinstance(schedule, str):
        raise ScheduleError(
            f"{call} takes a Schedule, and {schedule!r:.40} is a string: give it "
            f"make_schedule({schedule!r:.40}, devices=4, microbatches=8), or Schedule.parse(...) of a text"
        )


def parse_action(token: str, where: str = "") -> Action:
    """An action as `2F0`; `where` begins the error."""
    found = _ACTION.fullmatch(token)
    if found is None or found[2] not in _KINDS:
        shown = token if len(token) <= 40 else token[:37] + "..."
        raise ScheduleError(
            f"{where}{shown!r} is not an action; write stage, letter, microbatch, as in 2F0 or 3SEND_B1"
        )
    return Action(int(found[1]), _KINDS[found[2]], int(found[3]))


def _parse_text(text: str) -> list[list[Action]]:
    rows: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line == "#":
            continue
        found = _ROW.match(line)
        if found is None:
            raise ScheduleError(
                f"line {number}: {line[:40]!r} does not start with a device and a colon, as in `0: 0F0 0B0`"
            )
        if int(found[1]) != len(rows):
            raise ScheduleError(
                f"line {number}: device {found[1]} where device {len(rows)} was expected; they go 0, 1, 2, ... in order"
            )
        rows.append([parse_action(token, f"line {number}: ") for token in found[2].split()])
    return rows


def _parse_csv(text: str) -> list[list[Action]]:
    """An empty cell is an idle slot, as torch writes them; an empty line is a device without actions."""
    return [
        [parse_action(cell.strip(), f"line {number}: ") for cell in line.split(",") if cell.strip()]
        for number, line in enumerate(text.splitlines(), 1)
        if line != "#"
    ]


def _parse_json(text: str, name: str) -> Schedule:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"the schedule is not valid JSON: {str(error)[:120]}") from None
    rows: Any = data.get("rows") if isinstance(data, dict) else None
    listed = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not listed or not all(isinstance(token, str) for row in rows for token in row):
        raise ScheduleError(
            'the JSON has no "rows": it needs a list of actions per device, as in {"rows": [["0F0", "0B0"]]}'
        )
    label = data.get("schedule", name)
    parsed = [[parse_action(token, f"row {number}: ") for token in row] for number, row in enumerate(rows)]
    return Schedule.of(parsed, name=printable(label) if isinstance(label, str) else name)


def _placement_of(rows: Sequence[Sequence[Action]]) -> Placement:
    """Each (stage, microbatch) lives where its first action is; `verify` tells when another action is elsewhere."""
    total = sum(map(len, rows))
    devices: dict[int, dict[int, int]] = defaultdict(dict)
    updated: dict[int, int] = {}  # where the first update of a stage is, or verdict
    for device, row in enumerate(rows):
        for stage, kind, microbatch in row:
            if microbatch >= total or stage >= total:
                word, number = ("microbatch", microbatch) if microbatch >= total else ("stage", stage)
                raise ScheduleError(
                    f"{word} {number} in a schedule of {total} actions: numbers are 0, 1, 2, ... without gaps"
                )
            if kind in PER_MINIBATCH:
                updated.setdefault(stage, device)
            else:
                devices[stage].setdefault(microbatch, device)
    if devices:
        # A stage with updates alone is on a device all the same, so that `verify` can tell what it lacks.
        for stage, device in updated.items():
            devices.setdefault(stage, {0: device})
    missing = next((stage for stage in range(max(devices, default=-1)) if stage not in devices), None)
    if missing is not None or not devices:
        raise ScheduleError(
            f"stage {missing or 0} has no action, so it is on no device: stages are 0, 1, 2, ... without gaps"
        )
    cycles = []
    for _, found in sorted(devices.items()):
        last, several = next(iter(found.values())), len(set(found.values())) > 1
        cycles.append([last := found.get(m, last) for m in range(max(found) + 1 if several else 1)])
    return explicit(len(rows), cycles)
