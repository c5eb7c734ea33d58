"""Timelines as one page: a single file that works offline, in any current browser, with up to millions of actions.

The page trusts nobody. Names come from users, so in HTML they are escaped, in the data every `<`, `>` and `&` is a JSON
escape, and the script puts text only into text nodes. A content security policy lets nothing else run: `default-src
'none'`, and the one script and the one style sheet by their hashes.
"""

import json
from collections.abc import Sequence
from math import isinf
from pathlib import Path
from typing import Any

from gapless.errors import ScheduleError
from gapless.schedule.action import TRANSFERS, Kind
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline, plain
from gapless.view import columns, legend
from gapless.view.columns import row_offsets
from gapless.view.figures import Units
from gapless.view.host_lanes import lanes_of
from gapless.view.summary import named, table
from gapless.view.template import filled, policy, source
from gapless.view.text import percent

_SCRIPTS = (
    "timeline.data.js",
    "timeline.draw.js",
    "timeline.overlay.js",
    "timeline.frames.js",
    "timeline.js",
    "timeline.save.js",
    "timeline.link.js",
    "timeline.open.js",
)
_SQUEEZED = 3  # times the shortest makespan: what takes longer runs out of the window until one zooms out


def render(
    timelines: Sequence[Timeline],
    title: str | None = None,
    memory_limit: Number | None = None,
    *,
    units: Units | None = None,
    ranked: bool = True,
    overview: bool = False,
    front: str = "",
    back: str = "",
    refresh: int = 0,
) -> str:
    """The page as text. `memory_limit`, in the unit of the costs' `activation`, is drawn into every memory curve.

    units     what times and memory count; seconds by default, if one was measured
    ranked    whether the timelines compete: the best is marked, and the table comes before them
    overview  whether it opens with thin rows, for many timelines at a glance
    front     HTML that comes first, and `back` that comes after the table, both made by `template`
    refresh   seconds after which the page loads itself again; 0: never
    """
    if not timelines:
        raise ScheduleError("there is no timeline to draw: give at least one")
    units = units or (Units("s", "activations") if any(timeline.unit for timeline in timelines) else Units())
    packed = [columns.pack(lanes_of(timeline)) for timeline in timelines]
    data = shared(units, timelines, "overview" if overview else None) | {
        "timelines": [
            {**describe(timeline, units, timelines), "columns": described}
            for timeline, (described, _) in zip(timelines, packed, strict=True)
        ],
        "memoryLimit": None if memory_limit is None or isinf(memory_limit) else float(memory_limit),
        "home": _home(timelines) if ranked else None,
        "refresh": refresh,
    }
    return assemble(
        data,
        title=title or title_of(timelines),
        subtitle=_subtitle(timelines),
        front=front,
        key=(occurring := legend.present([timeline.schedule for timeline in timelines])),
        table=table(timelines, units, ranked),
        # The six kinds always, so that the page explains schedules not shown yet; transfers where they occur.
        legend=[kind for kind in legend.KINDS if kind not in TRANSFERS or kind in occurring],
        table_first=ranked and len(timelines) > 1,
        back=back,
        columns=[encoded for _, encoded in packed],
        style=source("timeline.css") + source("report.css"),
    )


def assemble(data: dict[str, Any], *, style: str, script: str = "", **parts: Any) -> str:
    """The template with its places filled. `script` is one more, at the end, which may ask where the page came from."""
    whole = "(() => {\n" + "".join(map(source, _SCRIPTS)) + script + "})();\n"
    known: dict[str, Any] = {"kinds": legend.KINDS, "entries": legend.ENTRIES, "transfers": TRANSFERS}
    sources = {"policy": policy(style, whole, asks=bool(script)), "style": style, "script": whole, "data": _json(data)}
    return filled("timeline.html", **known, **sources, **parts)


def write(path: str | Path, timelines: Sequence[Timeline], title: str | None = None, **options: Any) -> None:
    """The page as a file; `options` are those of `render`."""
    Path(path).write_text(render(timelines, title, **options), encoding="utf-8", newline="\n")


def title_of(timelines: Sequence[Timeline]) -> str:
    """`zb-v · 8 devices · 3.5% bubble`."""
    schedules = [timeline.schedule for timeline in timelines]
    devices = _several({schedule.num_devices for schedule in schedules}, "device")
    if len(timelines) == 1:
        return f"{named(timelines[0])} · {devices} · {percent(timelines[0].bubble)} bubble"
    if len({schedule.name for schedule in schedules}) == 1 and len(timelines) <= 3:
        bubbles = ", ".join(f"{percent(timeline.bubble)} {named(timeline)}" for timeline in timelines)
        return f"{schedules[0].name or 'schedule'} · {devices} · bubble {bubbles}"
    single = [timeline for timeline in timelines if timeline.schedule.num_minibatches == 1] or timelines
    best = min(single, key=lambda timeline: plain(timeline.makespan))
    return f"{len(timelines)} schedules · {devices} · {percent(best.bubble)} bubble at best ({named(best)})"


def _home(timelines: Sequence[Timeline]) -> float | None:
    """Where the time axis ends when the page opens, if that is not where the longest timeline does."""
    lengths = [float(timeline.makespan) for timeline in timelines]
    shown = [length for length in lengths if length <= _SQUEEZED * min(lengths)]
    return None if max(shown) == max(lengths) else max(shown)


def _json(data: Any) -> str:
    """JSON that can't end the script element it stands in."""
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return encoded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def shared(units: Units, timelines: Sequence[Timeline], rows: str | None = None) -> dict[str, Any]:
    """What all timelines of a page have in common; `rows` is how tall they are, if not what suits their devices."""
    return {
        "kinds": [_kind(kind) for kind in legend.KINDS],
        "ink": legend.INK,
        "time": vars(units.of_time(timelines)),
        "memory": vars(units.of_memory(timelines)),
        "rows": rows,
    }


def describe(timeline: Timeline, units: Units, among: Sequence[Timeline]) -> dict[str, Any]:
    """One timeline for the page, but for its columns. `among`: those that it shares units with."""
    schedule = timeline.schedule
    time, memory = units.of_time(among), units.of_memory(among)
    word = " activations" if units.memory == "activations" else ""
    figures = [
        ("makespan", time.text(timeline.makespan)),
        ("bubble", f"{percent(timeline.bubble, 2)} of makespan"),
        ("peak", memory.text(max(timeline.peak, default=0)) + word),
    ]
    if schedule.num_minibatches > 1:
        figures[:2] = [("per minibatch", time.text(timeline.period)), ("of", f"{schedule.num_minibatches} minibatches")]
    if schedule.has_copies:
        figures.append(("peak of the host", memory.text(max(timeline.host_peak)) + word))
    drawn = lanes_of(timeline)
    return {
        "name": named(timeline),
        "figures": figures,
        "rows": row_offsets(drawn.schedule),
        "labels": drawn.labels,
        "stages": drawn.stages,
        "tints": drawn.tints,
        "makespan": float(timeline.makespan),
        "spans": [
            [float(starts[0] - timeline.start), float(ends[-1] - timeline.start)] if starts else None
            for starts, ends in zip(drawn.starts, drawn.ends, strict=True)
        ],
        "peaks": [float(peak) for peak in drawn.peak],
    }


def _kind(kind: Kind) -> dict[str, Any]:
    steps, tints = range(legend.NUM_STEPS), range(legend.NUM_TINTS)
    return {
        "letter": kind.value,
        "name": legend.ENTRIES[kind].name,
        "counted": legend.counted(kind),
        "light": [[legend.shade(kind, tint, step, dark=False) for step in steps] for tint in tints],
        "dark": [[legend.shade(kind, tint, step, dark=True) for step in steps] for tint in tints],
    }


def _several(numbers: set[int], word: str) -> str:
    low, high = min(numbers), max(numbers)
    plural = f"{word}es" if word.endswith("h") else f"{word}s"
    return f"{low:,} {word if low == 1 else plural}" if low == high else f"{low:,} to {high:,} {plural}"


def _subtitle(timelines: Sequence[Timeline]) -> str:
    schedules = [timeline.schedule for timeline in timelines]
    return " · ".join(
        [
            _several({schedule.num_stages for schedule in schedules}, "stage"),
            _several({schedule.num_microbatches for schedule in schedules}, "microbatch"),
            _several({sum(schedule.num_actions for schedule in schedules)}, "action"),
        ]
    )
