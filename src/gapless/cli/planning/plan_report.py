"""The report of `gapless plan`: the ranking, why the first is the first, where its time and its memory go."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from gapless import units
from gapless.plan.asynchronous.alternatives import Alternative
from gapless.plan.explain import PARTS
from gapless.plan.plan import Plan
from gapless.plan.predict.footprint import Footprint
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import SLACK, Profile
from gapless.plan.search.search import Found
from gapless.plan.search.what_if import Answer
from gapless.view import text

_WIDTH = 100
_BAR = 40
_SHOWN_DEVICES = 64
_MEMORY = dict(zip((part.name for part in fields(Footprint)), "PGOAbwsr", strict=True))
_IDLE = "·"
FIGURES = ("schedule", "devices", "stages", "microbatches", "remat", "step", "samples/s", "waits", "memory")
_ROUNDING = 1e-9  # sums of floats vary with their order


def report(profile: Profile, found: Found, top: int, beside: Sequence[Alternative] = ()) -> str:
    """`top`: how many plans the table has at the most. `beside`: what else is listed there."""
    best = found.best
    parameters = sum(layer.parameters for layer in profile.layers)
    layers = units.show_count(len(profile.layers), "layer")
    parts = [
        (
            f"{profile.name or 'model'}: {layers}, {units.show_bytes(parameters)} of parameters, "
            f"minibatch of {best.minibatch}"
        ),
        _ranking(found, top, beside),
        "\n".join((textwrap.fill(found.explanation, _WIDTH), *without_a_pipeline(found))),
        _cuts(best),
        f"where the step of {units.show_seconds(best.step_seconds)} goes:\n{_breakdown(best)}",
        _memory_bars(best),
    ]
    if profile.slack > SLACK and profile.device.startswith("cuda"):
        parts.append(_about_the_allocator(profile))
    if found.rejected:
        told = "".join(f"\n  {choice}: {reason}" for choice, reason in rejections(found))
        parts.append(f"left out (the plan marked * takes {units.show_seconds(best.step_seconds)}):{told}")
    parts.append(textwrap.fill(best.how_good, _WIDTH))
    if best.caution:
        parts.append(textwrap.fill(f"caution: {best.caution}", _WIDTH))
    return "\n\n".join(parts)


def _about_the_allocator(profile: Profile) -> str:
    return textwrap.fill(
        f"the profile was measured with an allocator that loses {profile.slack:.0%} of temporary memory; with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True torch's loses {SLACK:.0%}, so more fits: set it to measure and "
        "to train",
        _WIDTH,
    )


def without_a_pipeline(found: Found) -> Iterator[str]:
    """What one device alone takes, and a replica on each device, whether or not that is among the plans."""
    for name, several in (("plain training on one device", False), ("data parallelism alone", True)):

        def asked(mesh: Mesh, several: bool = several) -> bool:
            return mesh.num_devices == 1 and (mesh.replicas > 1) == several

        plan = next((plan for plan in found.plans if asked(plan.mesh)), None)
        reasons = [reason for choice, reason in found.rejected if asked(choice.mesh)]
        bound = next((reason for reason in reasons if reason.startswith("it takes at least")), None)
        if plan is not None:
            yield f"{name}: {units.show_seconds(plan.step_seconds)} a step, {plan.title}"
        elif reasons:
            yield f"{name}: {(bound or reasons[0]).split(', however')[0].split(' (')[0]}"


_MARKS = {"asynchronous": "a", "not runnable yet": "n"}
_NEVER_CHOSEN = {
    "asynchronous": "a  asynchronous: no bubble, but gradients of older weights; never chosen, see --no-flush",
    "not runnable yet": "n  not runnable yet: stages differ in their numbers of replicas, which a mesh does not allow",
}


def _ranking(found: Found, top: int, beside: Sequence[Alternative]) -> str:
    rows, told = ranking(found, top, beside)
    return "\n".join([text.table(("", *FIGURES), rows, left=2), *told])


def ranking(found: Found, top: int, beside: Sequence[Alternative]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of the table of plans, each with its mark first, and what the marks mean but for `*`, the best."""
    plans = best_of_each_kind(found.plans, top)
    rows = [(plan.step_seconds, ("*" if plan is found.best else "", *_figures(plan))) for plan in plans]
    rows += [(other.seconds, (_MARKS[other.why], *_other_figures(other, found.best.minibatch))) for other in beside]
    rows.sort(key=lambda row: row[0])
    told = [words for why, words in _NEVER_CHOSEN.items() if any(other.why == why for other in beside)]
    return [row for _, row in rows], [*_price_of_auto(found), *told]


def _price_of_auto(found: Found) -> Iterator[str]:
    """What it takes of memory beside the fastest plan with 1f1b on as many devices, where that is more."""
    best = found.best
    plain = next((plan for plan in found.plans if plan.recipe == "1f1b" and plan.mesh == best.mesh), None)
    if best.recipe == "auto" and plain is not None:
        most, usual = (max(held.total for held in plan.memory) for plan in (best, plain))
        if most > usual:
            saved = 1 - best.step_seconds / plain.step_seconds
            yield (
                f"auto needs {units.show_bytes(most)} on its fullest device, 1f1b {units.show_bytes(usual)}: "
                f"{most / usual - 1:.0%} more memory for a step that is {saved:.0%} shorter"
            )


def _other_figures(other: Alternative, minibatch: int) -> tuple[str, ...]:
    return (
        other.name,
        "-".join(map(str, other.replicas)) if set(other.replicas) != {1} else str(len(other.replicas)),
        str(len(other.replicas)),
        f"{other.microbatches} of {other.samples}",
        "-",
        units.show_seconds(other.seconds),
        f"{minibatch / other.seconds:.4g}",
        "-",
        units.show_bytes(other.memory),
    )


def best_of_each_kind(plans: Sequence[Plan], most: int) -> list[Plan]:
    """The quickest of each recipe with its stages per device and replicas."""
    kinds: dict[tuple[Any, ...], Plan] = {}
    for plan in plans:
        kinds.setdefault((plan.recipe, plan.stages_per_device, plan.mesh), plan)
    return list(kinds.values())[:most]


def _figures(plan: Plan) -> tuple[str, ...]:
    again, away = (len(words) - words.count("none") for words in (plan.remat, plan.offload))
    waits = (plan.breakdown.bubble + plan.breakdown.communication) / plan.step_seconds
    return (
        plan.recipe,
        f"{plan.mesh.replicas} x {plan.num_devices}" if plan.mesh.replicas > 1 else str(plan.num_devices),
        str(plan.schedule.num_stages),
        f"{plan.microbatches} of {plan.samples}",
        (f"{again}/{len(plan.remat)}" if again else "-") + (f", offload {away}" if away else ""),
        units.show_seconds(plan.step_seconds),
        f"{plan.throughput:.4g}",
        text.percent(waits),
        units.show_bytes(max(held.total for held in plan.memory)),
    )


def _cuts(plan: Plan) -> str:
    lines = [f"layers per stage: {','.join(map(str, plan.partition))}"]
    kinds = {
        "stage": "recomputed stages",
        "layer": "stages recomputed layer by layer",
        "activations": "offloaded stages",
    }
    for kind, words in kinds.items():
        if some := [str(s) for s, each in enumerate(zip(plan.remat, plan.offload, strict=True)) if kind in each]:
            lines.append(f"{words}: {','.join(some)}")
    if plan.schedule.has_copies:
        most = float(max(plan.timeline.host_peak))
        lines.append(f"a device has up to {units.show_bytes(most)} of them in its host's memory")
    if plan.mesh.order:
        lines.append(f"devices, in the order of the pipeline: {','.join(map(str, plan.mesh.order))}")
    if plan.mesh.replicas > 1:
        lines.append("mesh: " + ", ".join(f"{name} {size}" for name, size in plan.mesh.dimensions))
    return "\n".join(lines)


def _breakdown(plan: Plan) -> str:
    total = plan.step_seconds or 1.0
    rows = []
    for part, name in PARTS.items():
        exact = getattr(plan.breakdown, part)
        seconds = exact if exact > _ROUNDING * total else 0.0
        rows.append(
            (name, units.show_seconds(seconds), text.percent(seconds / total), "#" * round(_BAR * seconds / total))
        )
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {seconds:>{widths[1]}}  {share:>{widths[2]}}  {bar}".rstrip()
        for name, seconds, share, bar in rows
    )


def _memory_bars(plan: Plan) -> str:
    """One bar per device, as long as the limit, with a letter for what fills it."""
    limits = [limit for limit in plan.limits if limit is not None]
    scale = max([*limits, *(held.total for held in plan.memory)])
    lines = ["memory per device" + (f", of {units.show_bytes(max(limits))}:" if limits else ":")]
    for device, (held, limit) in enumerate(zip(plan.memory, plan.limits, strict=True)):
        if device == _SHOWN_DEVICES:
            lines.append(f"  and {len(plan.memory) - device} more")
            break
        bar = _bar(held, scale)
        if limit is not None:
            end = round(_BAR * limit / scale)
            bar = f"{bar.ljust(end, _IDLE)}|".ljust(_BAR + 1)
        share = f"  {100 * held.total / limit:>3.0f}%" if limit is not None else ""
        lines.append(f"  {device:>2}  {bar.ljust(_BAR)}  {units.show_bytes(held.total):>9}{share}")
    used = [(letter, name) for name, letter in _MEMORY.items() if any(getattr(held, name) for held in plan.memory)]
    lines.append("  " + "  ".join(f"{letter} {name.replace('_', ' ')}" for letter, name in used))
    return "\n".join(lines)


def _bar(held: Footprint, scale: int) -> str:
    """Parts end where their sums do, so that rounding never adds up."""
    bar, total = "", 0
    for name, letter in _MEMORY.items():
        total += getattr(held, name)
        bar = bar.ljust(round(_BAR * total / scale), letter)
    return bar


def rejections(found: Found) -> list[tuple[str, str]]:
    """Per recipe the first choice that was rejected, and why; and how many more there are."""
    reasons: dict[str, list[tuple[str, str]]] = {}
    for rejection in found.rejected:
        said = (str(rejection.choice), rejection.reason.split(" (")[0])
        reasons.setdefault(rejection.choice.recipe, []).append(said)
    return [
        (choice, reason + (f" (and {len(said) - 1} more)" if len(said) > 1 else ""))
        for said in reasons.values()
        for choice, reason in said[:1]
    ]


def as_json(profile: Profile, found: Found, beside: Sequence[Alternative]) -> dict[str, Any]:
    """Schedules and costs are those of the best plan alone: of all plans they would be large."""
    return {
        "profile": profile.name,
        "explanation": found.explanation,
        "complete": found.complete,
        "cut_short": found.searched.cut_short,
        "gap": found.searched.gap,
        "how_good": found.best.how_good,
        "caution": found.best.caution,
        "best": found.best.to_json(),
        "plans": [
            {key: value for key, value in plan.to_json().items() if key not in ("schedule", "costs")}
            for plan in found.plans
        ],
        "others": [asdict(other) for other in beside],
        "rejected": [
            {
                "recipe": choice.recipe,
                "devices": choice.mesh.num_devices,
                "replicas": choice.mesh.replicas,
                "stages_per_device": choice.stages_per_device,
                "microbatches": choice.microbatches,
                "samples": choice.samples,
                "reason": reason,
            }
            for choice, reason in found.rejected
        ],
    }


def what_if_report(best: Plan, answers: Sequence[Answer]) -> str:
    """A line for each change: the gain in samples per second, and the plan that has it."""
    rows = [("as it is", units.show_seconds(best.step_seconds), f"{best.throughput:.4g}", "", best.title)]
    for answer in answers:
        if answer.plan is None:
            rows.append((answer.change.text, "", "", "-", answer.reason))
        else:
            step, speed = units.show_seconds(answer.plan.step_seconds), f"{answer.plan.throughput:.4g}"
            rows.append((answer.change.text, step, speed, f"+{100 * answer.gain:.1f}%", answer.plan.title))
    return text.table(("what if", "step", "samples/s", "gain", "plan"), rows, left=(0, 4))


def what_if_json(answer: Answer) -> dict[str, Any]:
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
