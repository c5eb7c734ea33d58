"""The report of a run, from what its folder says: so it can be written at the end, and at any time again."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless.checkpoint.disk import replace_file
from gapless.errors import ConfigError
from gapless.schedule.action import Schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline, costs_of
from gapless.train.run.metrics import RunPart, parts_of, read_metrics
from gapless.train.run.run_folder import RunFolder
from gapless.units import show_bytes, show_count, show_seconds
from gapless.view import run_page
from gapless.view.curves import Points
from gapless.view.figures import Units
from gapless.view.run_page import Curve, RunReport

Line = dict[str, Any]


def write_report(folder: RunFolder, path: Path | None = None, refresh: int = 0) -> Path:
    """The page as a file, in the run's folder unless another is named; a browser never sees half of it."""
    target = folder.report if path is None else path
    replace_file(target, run_page.render(report_of(folder), refresh).encode())
    return target


def report_of(folder: RunFolder) -> RunReport:
    """What the page shows."""
    said = folder.said()
    if said is None:
        raise ConfigError(f"{folder.path} holds no run: it has no run.json that can be read")
    lines = list(read_metrics(folder.metrics))
    steps = [line for line in lines if "loss" in line]
    measured = [line for line in steps if "bubble" in line]
    parts = parts_of(lines)
    kept = folder.timelines()
    if all(each.schedule.text() != said["schedule"] for each in kept):
        kept = []  # of what the run had before it was resumed
    timelines = _timelines(kept, said)
    return RunReport(
        _title(folder, said, timelines[0], parts),
        _tiles(steps, lines, parts),
        _curves(steps, lines, measured),
        _spent(steps, lines),
        [
            *([("Memory", _memory(measured))] if len(parts) == 1 else []),
            ("Environment", [(name, _shown(value)) for name, value in said["environment"].items()]),
        ],
        [("Config", _toml(said["config"])), ("Pipeline", said["pipeline"])],
        timelines,
        Units("s", "activations") if kept else Units(),
        [_card(part, before) for part, before in zip(parts, [None, *parts], strict=False)] if len(parts) > 1 else [],
        [part.after for part in parts[1:]],
    )


def _title(folder: RunFolder, said: dict[str, Any], shown: Timeline, parts: Sequence[RunPart]) -> str:
    names = dict.fromkeys([str(said["config"]["model"]["name"]), folder.path.absolute().name])
    last = f"since step {parts[-1].after + 1}: " if len(parts) > 1 else ""
    devices = show_count(shown.schedule.num_devices, "device")
    return " · ".join(
        [*names, last + (shown.schedule.name or "custom schedule"), devices, f"{shown.bubble:.1%} bubble"]
    )


def _card(part: RunPart, before: RunPart | None) -> tuple[str, list[tuple[str, str]]]:
    """A part of the run by itself, and what is new in it."""
    steps, where = part.steps, part.where
    title = f"Steps {steps[0]['step']:,} to {steps[-1]['step']:,}" if steps else f"After step {part.after:,}"
    rows: list[tuple[str, str]] = [
        (name, where[name]) for name in ("schedule", "devices", "microbatches") if name in where
    ]
    if before is not None:
        changed = [name for name in where if where[name] != before.where.get(name)]
        shown = [f"{name} ({before.where.get(name, 'not recorded')} before)" for name in changed]
        rows.append(("changed", ", ".join(shown)))
    return title, rows + _figures(part) + _memory([line for line in steps if "bubble" in line])


def _figures(part: RunPart) -> list[tuple[str, str]]:
    """What may only be averaged over one part of a run."""
    found, steps, timed = [], part.steps, part.warm_steps
    if timed:
        seconds = sum(line["seconds"] for line in timed)
        word = "tokens" if all("tokens" in line for line in timed) else "samples"
        found.append(("median step", show_seconds(statistics.median(line["seconds"] for line in timed))))
        found.append((f"{word} per second", f"{sum(line[word] for line in timed) / seconds:,.4g}"))
    if bubbles := [line for line in steps if "bubble" in line]:
        for name, key in (("measured", "bubble"), ("predicted", "predicted_bubble")):
            share = statistics.median(line[key] for line in bubbles)
            found.append((f"bubble, {name}", f"{share:.1%} of a step"))
    return found


def _tiles(steps: Sequence[Line], lines: Sequence[Line], parts: Sequence[RunPart]) -> list[tuple[str, str]]:
    found = [("steps", f"{steps[-1]['step']:,}" if steps else "0")]
    if steps:
        found.append(("last loss", f"{float(steps[-1]['loss']):.4g}"))
    found += _figures(parts[0]) if len(parts) == 1 else [("parts, a card each below", f"{len(parts)}")]
    evaluations = [float(line["evaluation"]) for line in lines if "evaluation" in line]
    if evaluations:
        found.append(("best evaluation", f"{min(evaluations):.4g}"))
    if skipped := sum("skipped" in line for line in steps):
        found.append(("updates left out", f"{skipped:,}"))
    ended = [line["ended"] for line in lines if "ended" in line]
    found.append(("ended", ended[-1] if ended else "still running, or killed"))
    return found


def _curves(steps: Sequence[Line], lines: Sequence[Line], measured: Sequence[Line]) -> list[Curve]:
    def of(key: str, among: Sequence[Line] = steps) -> Points:
        return [(line["step"], float(line[key])) for line in among if key in line]

    evaluation = of("evaluation", lines)
    word = "tokens" if steps and all("tokens" in line for line in steps) else "samples"
    speed = [(line["step"], line[word] / line["seconds"]) for line in steps if line["seconds"]]
    names = dict.fromkeys(name for line in measured for name in line["memory"])
    found = [
        Curve("Loss", "by step", [("training", of("loss")), *([("evaluation", evaluation)] if evaluation else [])]),
        Curve("Learning rate", "by step", [("rate", of("rate"))]),
        Curve("Speed", f"{word} per second", [("speed", speed)]),
        Curve("Gradient norm", "before clipping", [("norm", of("norm"))]),
    ]
    if measured:
        both = [("measured", of("bubble")), ("predicted", of("predicted_bubble"))]
        found.append(Curve("Bubble", "idle share of a step", both))
        memory = [
            (name, [(line["step"], line["memory"][name] / 2**20) for line in measured if name in line["memory"]])
            for name in list(names)[:4]
        ]
        found.append(Curve("Memory", "MiB", memory))
    return [curve for curve in found if any(points for _, points in curve.lines)]


def _spent(steps: Sequence[Line], lines: Sequence[Line]) -> list[tuple[str, float]]:
    waited, updated = (sum(line[key] for line in steps) for key in ("waited", "updated"))
    evaluated, saved = (sum(line["seconds"] for line in lines if key in line) for key in ("evaluation", "saved"))
    found = [
        ("forward and backward", sum(line["seconds"] for line in steps) - waited - updated),
        ("update of the weights", updated),
        ("waiting for data", waited),
        ("evaluation", evaluated),
        ("checkpoints", saved),
    ]
    return [(name, max(0.0, seconds)) for name, seconds in found]


def _memory(measured: Sequence[Line]) -> list[tuple[str, str]]:
    most: dict[str, int] = {}
    for line in measured:
        for name, size in line["memory"].items():
            most[name] = max(size, most.get(name, 0))
    return [(f"{name}, at most", show_bytes(size)) for name, size in most.items()] or [("not measured", "")]


def _timelines(kept: Sequence[Timeline], said: dict[str, Any]) -> list[Timeline]:
    """The usual one of the last, beside what its costs promise; without any, the schedule with unit costs."""
    whole = [each for each in kept if each.schedule.num_microbatches == max(t.schedule.num_microbatches for t in kept)]
    if not whole:
        return [simulate(Schedule.parse(said["schedule"]), name="predicted, with unit costs")]
    costs = costs_of(whole)
    usual = sorted(whole, key=lambda each: each.makespan)[len(whole) // 2]
    return [replace(usual, costs=costs, name="measured"), simulate(usual.schedule, costs, "predicted from its costs")]


def _shown(value: Any) -> str:
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _toml(config: dict[str, dict[str, Any]]) -> str:
    parts = []
    for table, keys in config.items():
        rows = [f"{key} = {_value(value)}" for key, value in keys.items()]
        parts.append("\n".join([f"[{table}]", *rows]))
    return "\n\n".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
