"""Timelines as one page: a single file that works offline, in any current browser, with up to millions of actions.

The page trusts nobody. Names come from users, so in HTML they are escaped, in the data every `<`, `>` and `&` is a JSON
escape, and the script puts text only into text nodes. A content security policy lets nothing else run: `default-src
'none'`, and the one script and the one style sheet by their hashes.
"""

import json
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from math import isinf
from pathlib import Path
from typing import Any

from gapless.errors import ScheduleError
from gapless.schedule.action import TRANSFERS, Kind
from gapless.schedule.costs import Number
from gapless.schedule.timeline import Timeline
from gapless.view import columns, legend
from gapless.view.needs import row_offsets
from gapless.view.summary import figure, named, table, text
from gapless.view.text import percent

_SCRIPTS = ("timeline.data.js", "timeline.draw.js", "timeline.overlay.js", "timeline.js")
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(
    timelines: Sequence[Timeline],
    title: str = "Pipeline schedules",
    memory_limit: Number | None = None,
    *,
    front: str = "",
    more_style: str = "",
) -> str:
    """The page as text. `memory_limit`, in the unit of the costs' `activation`, is drawn into every memory curve.
    `front` is HTML that comes first, whose text is escaped, with a style sheet of its own.
    """
    if not timelines:
        raise ScheduleError("there is no timeline to draw: give at least one")
    script = "(() => {\n" + "".join(map(_source, _SCRIPTS)) + "})();\n"
    style = _source("timeline.css") + more_style
    packed = [columns.pack(timeline) for timeline in timelines]
    data = {
        "timelines": [
            {**_description(timeline), "columns": described}
            for timeline, (described, _) in zip(timelines, packed, strict=True)
        ],
        "kinds": [_kind(kind) for kind in legend.KINDS],
        "ink": legend.INK,
        "memoryLimit": None if memory_limit is None or isinf(memory_limit) else float(memory_limit),
    }
    parts = {
        "policy": _policy(script, style),
        "title": text(title),
        "subtitle": text(_subtitle(timelines)),
        "style": style,
        "front": front,
        "script": script,
        "table": table(timelines),
        "legend": _legend(timelines),
        "sections": "\n".join(_section(number, timeline) for number, timeline in enumerate(timelines)),
        "data": _json(data),
        "columns": "\n".join(
            f'<script type="text/plain" id="columns-{number}">{encoded}</script>'
            for number, (_, encoded) in enumerate(packed)
        ),
    }
    # One pass over the template: what is put in is never searched for places again.
    return _PLACE.sub(lambda place: parts[place[1]], _source("timeline.html"))


def write(
    path: str | Path,
    timelines: Sequence[Timeline],
    title: str = "Pipeline schedules",
    memory_limit: Number | None = None,
) -> None:
    """The page as a file."""
    Path(path).write_text(render(timelines, title, memory_limit), encoding="utf-8", newline="\n")


def _source(name: str) -> str:
    return files("gapless.view").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'sha256-{_hash(script)}'",
            f"style-src 'sha256-{_hash(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hash(source: str) -> str:
    return b64encode(sha256(source.encode("utf-8")).digest()).decode("ascii")


def _json(data: Any) -> str:
    """JSON that can't end the script element it stands in."""
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return encoded.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _description(timeline: Timeline) -> dict[str, Any]:
    schedule = timeline.schedule
    return {
        "name": named(timeline),
        "rows": row_offsets(schedule),
        "stages": schedule.placement.stages,
        "tints": legend.tints(schedule),
        "makespan": float(timeline.makespan),
        "spans": [
            [float(starts[0] - timeline.start), float(ends[-1] - timeline.start)] if starts else None
            for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        ],
        "peaks": [float(peak) for peak in timeline.peak],
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


def _subtitle(timelines: Sequence[Timeline]) -> str:
    def several(numbers: set[int], word: str) -> str:
        low, high = min(numbers), max(numbers)
        return f"{low:,} {word}{'' if low == 1 else 's'}" if low == high else f"{low:,} to {high:,} {word}s"

    schedules = [timeline.schedule for timeline in timelines]
    total = sum(schedule.num_actions for schedule in schedules)
    return " · ".join(
        [
            several({len(schedules)}, "schedule"),
            several({schedule.num_devices for schedule in schedules}, "device"),
            several({schedule.num_microbatches for schedule in schedules}, "microbatch").replace("hs", "hes"),
            several({total}, "action"),
        ]
    )


def _legend(timelines: Sequence[Timeline]) -> str:
    """The six kinds always, so that the page explains schedules not shown yet; transfers where they occur."""
    occurring = legend.present([timeline.schedule for timeline in timelines])
    items = []
    for kind, entry in legend.ENTRIES.items():
        if kind in TRANSFERS and kind not in occurring:
            continue
        absent = "" if kind in occurring else ' class="absent"'
        items.append(
            f'<div{absent}><dt><span class="swatch" data-kind="{legend.KINDS.index(kind)}">'
            f"{'' if kind in TRANSFERS else kind.value}</span>"
            f"{text(entry.name)}</dt><dd>{text(entry.meaning)}</dd></div>"
        )
    return "\n".join(items)


def _section(number: int, timeline: Timeline) -> str:
    schedule = timeline.schedule
    name = text(named(timeline))
    figures = (
        f"<span>makespan <b>{figure(timeline.makespan)}</b></span>"
        f"<span>bubble <b>{percent(timeline.bubble, 2)}</b></span>"
        f"<span>peak <b>{figure(max(timeline.peak, default=0))}</b></span>"
    )
    label = f"{name}: {schedule.num_devices} devices, {schedule.num_actions} actions"
    return (
        f'<section class="timeline" id="timeline-{number}" aria-labelledby="name-{number}">'
        f'<header><h2 id="name-{number}" title="{name}">{name}</h2><p class="figures">{figures}</p></header>'
        f'<div class="plot" tabindex="0" role="group" aria-label="{label}" aria-describedby="keys"></div></section>'
    )
