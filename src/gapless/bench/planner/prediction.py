"""Is a plan right? What it predicts for a step and for its memory, against what is measured.

Layers are measured one by one, a plan is made from that alone, and then its pipeline runs. All pipelines of a model
take turns. Live bytes are those of the storages that a device's actions have made, at their peak: activations, messages
and what an action takes while it runs. Parameters, gradients and optimizer state are counted, not predicted.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from gapless.bench.apart import keep_apart
from gapless.bench.planner.settings import (
    Subject,
    emulated,
    planned,
    random_layers,
    small_gpt,
    small_resnet,
    small_transformer,
    small_unet,
    threads_hop,
)
from gapless.bench.rounds import Progress, median, take_turns, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.profile.contention import in_company
from gapless.plan.profile.meter import StorageMeter
from gapless.plan.profile.profile import Profile
from gapless.schedule.simulate import simulate
from gapless.view import text

OVER, UNDER = 0.10, 0.05  # by how much a prediction may be wrong
_SESSIONS = 3
Setting = tuple[str, int, bool]  # schedule, M, remat


def settings(quick: bool) -> list[tuple[Subject, int, list[Setting]]]:
    """(model, K, how it is run)"""
    even = [(4.0, 4.0, 4.0)] * 16
    uneven = [(1.0 + n % 3, 1.5 + n % 3, 1.0 + n % 2) for n in range(24)]
    if quick:
        return [
            (emulated("emulated, even", even[:4]), 2, [("1f1b", 4, False)]),
            (small_gpt(width=32, depth=2, length=8), 2, [("gpipe", 4, False)]),
        ]
    return [
        (
            emulated("emulated, even", even),
            4,
            [
                ("1f1b", 8, False),
                ("1f1b", 8, True),
                ("gpipe", 8, False),
                ("zb-h1", 8, False),
                ("interleaved", 8, False),
                ("zb-v", 8, False),
            ],
        ),
        (
            emulated("emulated, uneven", uneven),
            3,
            [("1f1b", 6, False), ("1f1b", 12, True), ("zb-h1", 12, False), ("interleaved", 6, False)],
        ),
        (emulated("emulated, even", even), 8, [("1f1b", 16, False), ("zb-h1", 16, False)]),
        (
            small_gpt(),
            2,
            [
                ("1f1b", 4, False),
                ("1f1b", 8, False),
                ("1f1b", 8, True),
                ("gpipe", 8, False),
                ("gpipe", 8, True),
                ("zb-h1", 8, False),
                ("interleaved", 8, False),
            ],
        ),
        (
            small_resnet(18, width=8, side=64),
            2,
            [("1f1b", 4, False), ("1f1b", 8, True), ("gpipe", 8, False), ("gpipe", 8, True)],
        ),
        (small_unet(side=32), 2, [("1f1b", 4, False), ("gpipe", 8, True), ("zb-h1", 8, False)]),
        (
            small_transformer(vocab=1000),
            2,
            [("1f1b", 4, False), ("1f1b", 8, True), ("interleaved", 8, False)],
        ),
        (random_layers(8), 2, [("1f1b", 4, False), ("1f1b", 8, True), ("zb-h1", 8, False)]),
    ]


def run(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for subject, devices, wanted in settings(quick):
        progress(f"measuring {subject.name}")
        sessions = 1 if subject.emulated else _SESSIONS
        profile = threads_hop(subject.profile("cpu", devices, seconds / sessions))
        plans = [planned(profile, devices, name, M, remat=remat) for name, M, remat in wanted]
        held = [None if subject.emulated else _live(subject, plan) for plan in plans]
        pairs = _steps(subject, plans, profile, sessions, rounds, seconds / sessions, progress)
        rows += [_row(subject, plan, mine, live) for plan, mine, live in zip(plans, pairs, held, strict=True)]
    return {"rows": rows, "over": OVER, "under": UNDER, **_verdict(rows)}


def _steps(
    subject: Subject,
    plans: Sequence[Plan],
    profile: Profile,
    sessions: int,
    rounds: int,
    seconds: float,
    progress: Progress,
) -> list[list[tuple[float, float]]]:
    """For each plan and session what was predicted and what was measured. The layers are measured anew in each: on real
    processors, what the same work takes changes from minute to minute.
    """
    pipes = [_pipeline(subject, plan) for plan in plans]
    found: list[list[tuple[float, float]]] = [[] for _ in plans]
    try:
        contestants = {}
        for number, (pipe, plan) in enumerate(zip(pipes, plans, strict=True)):
            inputs, target = subject.batch(plan.minibatch)
            contestants[f"{subject.name}, {plan.title} ({number})"] = timed(
                lambda pipe=pipe, inputs=inputs, target=target: pipe.step(inputs, target)  # type: ignore[misc]
            )
        for session in range(sessions):
            if session:
                profile = threads_hop(subject.profile("cpu", plans[0].num_devices, seconds))
            taken = take_turns(contestants, max(1, rounds // sessions), progress, warmup=1 if session else 2)
            for mine, plan, values in zip(found, plans, taken.values(), strict=True):
                mine.append((_predicted(plan, profile), median(values)))
        return found
    finally:
        for pipe in pipes:
            pipe.close()


def _predicted(plan: Plan, profile: Profile) -> float:
    """The step of a plan, from another measurement of its layers."""
    stages = make_stages(profile, plan.partition, plan.schedule.placement, plan.mesh, [1.0] * plan.num_devices)
    return float(simulate(plan.schedule, in_company(stages.costs, plan.schedule, profile.company)).makespan)


def _pipeline(subject: Subject, plan: Plan) -> Pipeline:
    return subject.pipeline(plan, ["cpu"] * plan.num_devices, copy.deepcopy(list(subject.layers)))


def _live(subject: Subject, plan: Plan) -> int:
    """The most bytes that the actions of a device have made and that are there at a time, summed over the devices."""
    meters = [StorageMeter() for _ in range(plan.num_devices)]

    def watched(call: Callable[..., Any], meter: StorageMeter) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with meter.on():
                return call(*args, **kwargs)

        return run

    inputs, target = subject.batch(plan.minibatch)
    with _pipeline(subject, plan) as pipe:
        keep_apart(pipe, [meter.on for meter in meters])
        for number, stage in enumerate(pipe._stages):
            meter = meters[plan.schedule.placement.device(number, 0)]
            for name in ("forward", "recompute", "backward", "backward_input", "backward_weight"):
                setattr(stage, name, watched(getattr(stage, name), meter))
        pipe.step(inputs, target)
        before = sum(meter.live() for meter in meters)  # gradients are there by now
        for meter in meters:
            meter.peak()
        pipe.step(inputs, target)
    return sum(meter.peak() for meter in meters) - before


def _held(plan: Plan) -> int:
    """The same as predicted."""
    return sum(held.activations + held.buffers + held.workspace for held in plan.memory)


def _row(subject: Subject, plan: Plan, pairs: Sequence[tuple[float, float]], live: int | None) -> dict[str, Any]:
    predicted, measured = median([one for one, _ in pairs]), median([other for _, other in pairs])
    found: dict[str, Any] = {
        "model": subject.name,
        "devices": plan.num_devices,
        "schedule": plan.recipe,
        "microbatches": plan.microbatches,
        "remat": "stage" in plan.remat,
        "predicted": predicted,
        "measured": measured,
        "difference": median([one / other for one, other in pairs]) - 1,
        "predicted_bytes": None,
        "measured_bytes": None,
        "bytes_difference": None,
        "sessions": list(pairs),
    }
    if live is not None:
        held = _held(plan)
        found |= {"predicted_bytes": held, "measured_bytes": live, "bytes_difference": held / live - 1}
    return found


def _verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = [row["difference"] for row in rows]
    sizes = [row["bytes_difference"] for row in rows if row["bytes_difference"] is not None]
    return {
        "times_right": sum(-UNDER <= value <= OVER for value in times),
        "times": len(times),
        "sizes_right": sum(-UNDER <= value <= OVER for value in sizes),
        "sizes": len(sizes),
    }


def report(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        size = ("", "", "")
        if row["measured_bytes"] is not None:
            size = (
                f"{row['predicted_bytes'] / 2**20:.2f} MiB",
                f"{row['measured_bytes'] / 2**20:.2f} MiB",
                _signed(row["bytes_difference"]),
            )
        rows.append(
            (
                row["model"],
                row["schedule"],
                str(row["devices"]),
                str(row["microbatches"]),
                "yes" if row["remat"] else "-",
                f"{1000 * row['predicted']:.1f} ms",
                f"{1000 * row['measured']:.1f} ms",
                _signed(row["difference"]),
                *size,
            )
        )
    headings = ("model", "schedule", "K", "M", "remat", "predicted", "measured", "", "held", "measured", "")
    return "\n".join(
        [
            text.table(headings, rows, left=2),
            "",
            (
                f"within -{found['under']:.0%} and +{found['over']:.0%}: {found['times_right']} of {found['times']} "
                f"steps, {found['sizes_right']} of {found['sizes']} peaks"
            ),
        ]
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}%"
