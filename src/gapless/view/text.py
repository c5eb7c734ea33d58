"""Schedules on a terminal: a grid with one row per device and time from left to right, and plain tables.

    0 F0 F1 F2 F3 ......... B0--- B1--- B2--- B3---
    1    F0 F1 F2 F3 ... B0--- B1--- B2--- B3---

Coloured on a terminal, plain otherwise; it fits the width it is given. Where actions of a kind get too narrow for their
numbers, all of them keep their letter. Where even that has no room, a column shows what its device does for most of its
time, and a line says how much time that is.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline, plain
from gapless.schedule.verify import Report
from gapless.schedule.violation import Violation, excerpt
from gapless.view.host_lanes import lanes_of
from gapless.view.legend import ENTRIES, present

_COLOURS = {
    Kind.FORWARD: "30;104",
    Kind.BACKWARD: "30;101",
    Kind.INPUT_GRAD: "30;103",
    Kind.WEIGHT_GRAD: "30;102",
    Kind.RECOMPUTE: "30;105",
    Kind.OFFLOAD: "30;106",
    Kind.LOAD: "30;46",
    Kind.UPDATE: "30;47",
    Kind.VERDICT: "30;43",
}
_IDLE = "·"
_LANES = {"  to host": "out", "  from host": "in"}


def grid(timeline: Timeline, width: int = 100, colour: bool = False) -> str:
    """The timeline as text, at most `width` columns wide."""
    drawn = lanes_of(timeline)
    timeline, schedule = drawn, drawn.schedule
    heads = [
        str(n) if label.startswith("device") else _LANES[label]
        for label, n in zip(drawn.labels, drawn.devices, strict=True)
    ]
    margin = max(map(len, heads)) + 1
    columns = max(10, width - margin)
    scale, shortest = _scale(timeline, columns), _shortest(timeline)
    crowded = scale * shortest < 1 - 1e-9
    # Stages are named where a device has several and every action has the room, so that a grid has one kind of label.
    staged = schedule.num_stages > len(set(drawn.devices)) and scale * shortest >= _label_width(schedule)
    rows = [
        _columns(timeline, device, scale) if crowded else _cells(timeline, device, scale, staged)
        for device in range(schedule.num_devices)
    ]
    labelled = _with_room(chain.from_iterable(rows))
    lines = []
    for device, row in enumerate(rows):
        cells = [
            (kind, _label(label if kind in labelled else str(kind), wide) if kind else _IDLE * wide)
            for kind, label, wide in row
        ]
        lines.append(f"{heads[device]:>{margin - 1}} " + "".join(_painted(cells, colour)).rstrip())
    if crowded:
        said = f"1 column = {1 / scale:.3g} of time, and shows what took most of it; `--html` shows every action"
        lines += textwrap.wrap(said, width)
    return "\n".join(lines)


def _scale(timeline: Timeline, columns: int) -> float:
    """Columns per unit of time: enough for every label if that fits, else what fits."""
    total, shortest = float(timeline.makespan), _shortest(timeline)
    if not shortest or total <= 0:
        return 1.0
    scale = min((_label_width(timeline.schedule) + 1) / shortest, columns / total)
    return scale if math.isfinite(scale) else 1.0


def _shortest(timeline: Timeline) -> float:
    """The shortest action that takes any time; 0 where none does."""
    return min((float(end - start) for _, start, end in timeline.all_spans if end > start), default=0.0)


def _label_width(schedule: Schedule) -> int:
    stage = len(str(schedule.num_stages - 1)) if schedule.num_stages > schedule.num_devices else 0
    return stage + 1 + len(str(max(0, schedule.num_microbatches - 1)))


Block = tuple[Kind | None, str, int]  # what is done, its label, and for how many columns
Cell = tuple[Kind | None, str]


def _cells(timeline: Timeline, device: int, scale: float, staged: bool) -> list[Block]:
    """From left to right, each action in at least one column."""
    at, first = 0, float(timeline.start)
    blocks: list[Block] = []
    for action, start, end in timeline.spans(device):
        left, right = (math.floor((float(when) - first) * scale + 0.5) for when in (start, end))
        if action.kind not in _COLOURS or right <= left:
            continue
        if left > at:
            blocks.append((None, "", left - at))
        blocks.append((action.kind, str(action) if staged else f"{action.kind}{action.microbatch}", right - left))
        at = right
    return blocks


def _columns(timeline: Timeline, device: int, scale: float) -> list[Block]:
    """Column by column, what took most of its time: actions are narrower than that."""
    first, shares = float(timeline.start), defaultdict[int, defaultdict[Kind, float]](lambda: defaultdict(float))
    for action, start, end in timeline.spans(device):
        left, right = ((float(when) - first) * scale for when in (start, end))
        for column in range(math.floor(left), math.ceil(right)) if action.kind in _COLOURS else ():
            shares[column][action.kind] += min(right, column + 1) - max(left, column)
    blocks: list[Block] = []
    for column in range(max(shares, default=-1) + 1):
        busy = shares[column]
        kind = max(busy, key=busy.__getitem__, default=None)
        is_idle = kind is None or 1 - sum(busy.values()) > busy[kind]
        blocks.append((None if is_idle else kind, "", 1))
    return blocks


def _with_room(blocks: Iterable[Block]) -> set[Kind]:
    """The kinds of which every action has the room for its label: numbers are on all of a kind or on none."""
    found: dict[Kind, bool] = {}
    for kind, label, width in blocks:
        if kind is not None:
            found[kind] = found.get(kind, True) and 0 < len(label) <= width
    return {kind for kind, fits in found.items() if fits}


def _label(label: str, width: int) -> str:
    """With a gap to the next action where there is room for one."""
    room = width - 1 if len(label) < width else width
    return label.ljust(room, "-" if len(label) > 1 else " ") + " " * (width - room)


def _painted(cells: Iterable[Cell], colour: bool) -> list[str]:
    if not colour:
        return [text for _, text in cells]
    return [
        f"\x1b[2m{text}\x1b[0m" if kind is None else f"\x1b[{_COLOURS[kind]}m{text.replace('-', ' ')}\x1b[0m"
        for kind, text in cells
    ]


def key(schedule: Schedule, colour: bool = False) -> str:
    """What the letters mean, for the kinds that occur."""
    letters = [
        f"\x1b[{_COLOURS[kind]}m {kind} \x1b[0m {ENTRIES[kind].name}" if colour else f"{kind} {ENTRIES[kind].name}"
        for kind in present([schedule])
        if kind in _COLOURS
    ]
    return "  ".join([*letters, f"{_IDLE} idle"])


def number(value: Number | None) -> str:
    """Six digits at most; whole numbers without a point."""
    if value is None:
        return "-"
    short = plain(value)
    return str(short) if isinstance(short, int) else f"{short:.6g}"


def percent(share: Number, digits: int = 1) -> str:
    """A share in per cent, with so many digits behind the point."""
    return f"{100 * float(share):.{digits}f}%"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int | Sequence[int] = 1) -> str:
    """Columns two spaces apart; the first `left` ones, or those in it, flush left, the others flush right."""
    flush = range(left) if isinstance(left, int) else left
    widths = [max(len(row[i]) for row in (headings, *rows)) for i in range(len(headings))]
    lines = []
    for row in (headings, *rows):
        cells = [
            cell.ljust(w) if i in flush else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def violations(report: Report, width: int = 100, colour: bool = False, most: int = 10) -> str:
    """The first violations, each shown in its row; the whole schedule with all of them marked where it fits the
    width.
    """
    schedule, found = report.schedule, (*report.violations, *report.warnings)
    lines = []
    rows = _marked_rows(schedule, found, colour)
    small = schedule.num_devices <= 40 and schedule.num_actions <= 2000
    if small and all(plain_width <= width for _, plain_width in rows):
        lines += [text for text, _ in rows] + [""]
    for violation in found[:most]:
        lines += [f"device {violation.device}: {violation.message}", excerpt(schedule, violation)]
    if len(found) > most:
        lines.append(f"and {len(found) - most} more")
    return "\n".join(lines)


def _marked_rows(schedule: Schedule, found: Sequence[Violation], colour: bool) -> list[tuple[str, int]]:
    """Each row with its violations in brackets, and how wide it is without colours."""
    bad = {(violation.device, violation.position) for violation in found}
    rows = []
    for device, row in enumerate(schedule.rows):
        tokens = [str(action) for action in row] + (["?"] if (device, len(row)) in bad else [])
        marked = [f"[{token}]" if (device, i) in bad else token for i, token in enumerate(tokens)]
        width = len(f"{device}: {' '.join(marked)}")
        if colour:
            marked = [f"\x1b[1;31m{token}\x1b[0m" if (device, i) in bad else token for i, token in enumerate(marked)]
        rows.append((f"{device}: {' '.join(marked)}", width))
    return rows
