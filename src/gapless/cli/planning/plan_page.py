"""The page of `gapless plan`: what the plan promises, where time and memory go, its timelines, and the other plans."""

from collections.abc import Sequence
from dataclasses import fields

from gapless import units
from gapless.cli.planning.plan_report import FIGURES, best_of_each_kind, ranking, rejections, without_a_pipeline
from gapless.plan.asynchronous.alternatives import Alternative
from gapless.plan.explain import PARTS
from gapless.plan.plan import Plan
from gapless.plan.predict.footprint import Footprint
from gapless.plan.profile.profile import Profile
from gapless.plan.search.search import Found
from gapless.plan.search.what_if import Answer
from gapless.view import page
from gapless.view.figures import Units
from gapless.view.template import filled

_SHOWN_DEVICES = 64
_NUM_TIMELINES = 3


def render(
    profile: Profile, found: Found, top: int, others: Sequence[Alternative] = (), answers: Sequence[Answer] = ()
) -> str:
    """The page as text. `top`: how many plans the table has at the most; `others` can't be chosen, and `answers` are
    what changes of the machine would bring.
    """
    best = found.best
    step = units.show_seconds(best.step_seconds)
    devices = best.num_devices * best.mesh.replicas
    rows, told = ranking(found, top, others)
    used = [part.name for part in fields(Footprint) if any(getattr(held, part.name) for held in best.memory)]
    more = len(best.memory) - _SHOWN_DEVICES
    front = filled(
        "plan_front.html",
        __package__,
        tiles=_tiles(profile, best),
        step=step,
        breakdown=_breakdown(best),
        memory_title=_memory_title(best),
        memory_parts=[name.replace("_", " ") for name in used],
        memory=_memory(best, used)[:_SHOWN_DEVICES],
        more_devices=f"and {units.show_count(more, 'device')} more" if more > 0 else "",
        reasons=_reasons(found),
        figures=FIGURES,
        plans=[_marked(row) for row in rows],
        best=[mark for mark, *_ in rows].index("*"),
        marks=told,
    )
    changes = [
        (answer.change.text, "-", answer.reason)
        if answer.plan is None
        else (answer.change.text, f"+{100 * answer.gain:.1f}%", answer.plan.title)
        for answer in answers
    ]
    back = filled("plan_back.html", __package__, stages=_stages(best), changes=changes, left_out=rejections(found))
    return page.render(
        [plan.timeline for plan in best_of_each_kind(found.plans, _NUM_TIMELINES)],
        f"{profile.name or 'model'} · {best.recipe} · {units.show_count(devices, 'device')} · {step} a step",
        room_for_activations(best),
        units=Units("s", "bytes"),
        front=front,
        back=back,
    )


def room_for_activations(plan: Plan) -> int | None:
    """The limit as a curve of activations meets it: what all else leaves on the device with the least room."""
    pairs = zip(plan.memory, plan.limits, strict=True)
    return min((limit - (held.total - held.activations) for held, limit in pairs if limit is not None), default=None)


def _reasons(found: Found) -> list[str]:
    best = found.best
    more = [best.how_good, *([f"caution: {best.caution}"] if best.caution else [])]
    return [found.explanation, *(f"{words[:1].upper()}{words[1:]}." for words in (*without_a_pipeline(found), *more))]


def _marked(row: tuple[str, ...]) -> tuple[str, ...]:
    """What is never chosen keeps its letter; the best has a colour."""
    mark, name, *figures = row
    return f"{name} ({mark})" if mark not in ("", "*") else name, *figures


def _tiles(profile: Profile, best: Plan) -> list[tuple[str, str]]:
    fullest = max(held.total for held in best.memory)
    parameters = sum(layer.parameters for layer in profile.layers)
    return [
        ("step", units.show_seconds(best.step_seconds)),
        ("samples per second", f"{best.throughput:,.4g}"),
        ("schedule", best.recipe),
        ("devices", f"{best.mesh.replicas} x {best.num_devices}" if best.mesh.replicas > 1 else str(best.num_devices)),
        ("minibatch", f"{best.minibatch:,}"),
        ("microbatches", f"{best.microbatches} of {best.samples}"),
        ("fullest device", units.show_bytes(fullest)),
        ("model", f"{units.show_count(len(profile.layers), 'layer')}, {units.show_bytes(parameters)}"),
    ]


def _breakdown(plan: Plan) -> list[tuple[str, float, str]]:
    total = plan.step_seconds or 1.0
    seconds = [(name, max(0.0, getattr(plan.breakdown, part))) for part, name in PARTS.items()]
    return [(name, each / total, units.show_seconds(each)) for name, each in seconds]


def _memory_title(plan: Plan) -> str:
    limits = [limit for limit in plan.limits if limit is not None]
    return f"Memory per device, of {units.show_bytes(max(limits))}" if limits else "Memory per device"


def _memory(plan: Plan, used: Sequence[str]) -> list[tuple[str, list[float], str, float | None]]:
    """A bar for each device: its parts as shares of the longest bar or limit, what it holds, and its limit."""
    most = max([held.total for held in plan.memory] + [limit for limit in plan.limits if limit is not None])
    bars = []
    for device, (held, limit) in enumerate(zip(plan.memory, plan.limits, strict=True)):
        words = units.show_bytes(held.total) + ("" if limit is None else f" ({100 * held.total / limit:.0f}%)")
        shares = [getattr(held, name) / most for name in used]
        bars.append((f"device {device}", shares, words, None if limit is None else limit / most))
    return bars


def _stages(plan: Plan) -> list[tuple[str, ...]]:
    """Each with its device, as the plan numbers it, its layers from the first to the last, and what is recomputed."""
    words = {"none": "-", "stage": "whole", "layer": "layer by layer"}
    device_of = {stage: device for device, stages in enumerate(plan.schedule.placement.stages) for stage in stages}
    found: list[tuple[str, ...]] = []
    first = 0
    for stage, (count, remat, offload) in enumerate(zip(plan.partition, plan.remat, plan.offload, strict=True)):
        device = device_of[stage]
        own = plan.mesh.order[device] if plan.mesh.order else device
        span = f"{first} to {first + count - 1}" if count > 1 else str(first)
        found.append(
            (str(stage), str(own), f"{span} ({count})", words[remat] + (", offloaded" if offload != "none" else ""))
        )
        first += count
    return found
