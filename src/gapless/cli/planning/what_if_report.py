"""What `gapless plan --what-if` prints: a line for each change, with what it brings."""

from collections.abc import Sequence
from typing import Any

from gapless import units
from gapless.plan.plan import Plan
from gapless.plan.search.what_if import Answer


def report(best: Plan, answers: Sequence[Answer]) -> str:
    """The gain in samples per second, and the plan that has it."""
    rows = [("as it is", units.show_seconds(best.step_seconds), f"{best.throughput:.4g}", "", best.title)]
    for answer in answers:
        if answer.plan is None:
            rows.append((answer.change.text, "", "", "-", answer.reason))
        else:
            step, speed = units.show_seconds(answer.plan.step_seconds), f"{answer.plan.throughput:.4g}"
            rows.append((answer.change.text, step, speed, f"+{100 * answer.gain:.1f}%", answer.plan.title))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    headings = ("what if", "step", "samples/s", "gain", "plan")
    widths = [max(width, len(heading)) for width, heading in zip(widths, headings, strict=False)]
    return "\n".join(_line(row, widths) for row in (headings, *rows))


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *figures = row[:4]
    aligned = [f"{cell:>{width}}" for cell, width in zip(figures, widths[1:], strict=True)]
    return "  ".join((f"{first:<{widths[0]}}", *aligned, row[4])).rstrip()


def as_json(answer: Answer) -> dict[str, Any]:
    """The plan in short: schedules and costs would be large."""
    plan = answer.plan
    return {
        "change": answer.change.text,
        "gain": answer.gain,
        "reason": answer.reason,
        "step_seconds": None if plan is None else plan.step_seconds,
        "throughput": None if plan is None else plan.throughput,
        "plan": None if plan is None else plan.title,
    }
