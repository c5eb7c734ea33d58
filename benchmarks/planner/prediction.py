"""Is a plan right? What it predicts for a step and for its memory, against what is measured.

Layers are measured one by one, a plan is made from that alone, and then its pipeline runs. All pipelines of a model
take turns. Live bytes are those of the storages that a device's actions have made, at their peak: activations, messages
and what an action takes while it runs. Parameters, gradients and optimizer state are counted, not predicted.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from benchmarks.planner import subjects
from benchmarks.planner.apart import Apart
from benchmarks.planner.subjects import Subject
from benchmarks.runner.findings import Found, Table, tabulated
from benchmarks.runner.rounds import Progress, median, take_turns
from gapless import simulate
from gapless.plan.cut.stage_costs import make_stages
from gapless.plan.plan import Plan
from gapless.plan.profile.meter import StorageMeter
from gapless.plan.profile.profile import Profile

OVER, UNDER = 0.10, 0.05  # by how much a prediction may be wrong
_SESSIONS = 3


def settings(quick: bool) -> list[tuple[Subject, int, str]]:
    """(model, K, the plans that run: of each the schedule, M, and whether it recomputes)"""
    even = [(4.0, 4.0, 4.0)] * 16
    uneven = [(1.0 + n % 3, 1.5 + n % 3, 1.0 + n % 2) for n in range(24)]
    if quick:
        return [
            (subjects.emulated("emulated, even", even[:4]), 2, "1f1b 4"),
            (subjects.small_gpt(width=32, depth=2, length=8), 2, "gpipe 4"),
        ]
    return [
        (subjects.emulated("emulated, even", even), 4, "1f1b 8, 1f1b 8 remat, gpipe 8, zb-h1 8, interleaved 8, zb-v 8"),
        (subjects.emulated("emulated, uneven", uneven), 3, "1f1b 6, 1f1b 12 remat, zb-h1 12, interleaved 6"),
        (subjects.emulated("emulated, even", even), 8, "1f1b 16, zb-h1 16"),
        (subjects.small_gpt(), 2, "1f1b 4, 1f1b 8, 1f1b 8 remat, gpipe 8, gpipe 8 remat, zb-h1 8, interleaved 8"),
        (subjects.small_resnet(18, width=8, side=64), 2, "1f1b 4, 1f1b 8 remat, gpipe 8, gpipe 8 remat"),
        (subjects.small_unet(side=32), 2, "1f1b 4, gpipe 8 remat, zb-h1 8"),
        (subjects.small_transformer(vocab=1000), 2, "1f1b 4, 1f1b 8 remat, interleaved 8"),
        (subjects.random_layers(8), 2, "1f1b 4, 1f1b 8 remat, zb-h1 8"),
    ]


def plans_for(profile: Profile, devices: int, wanted: str) -> list[Plan]:
    """The schedule and M of each, and whether it recomputes: as in `settings`."""
    words = (each.split() for each in wanted.split(", "))
    return [subjects.planned(profile, devices, name, int(M), "stage" if again else "none") for name, M, *again in words]


def run(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> tuple[list[Found], Table]:
    """A row for each plan: the step and the bytes as predicted and as measured; and how many are as near as meant."""
    rows: list[dict[str, Any]] = []
    for subject, devices, wanted in settings(quick):
        progress(f"measuring {subject.name}")
        # Layers are measured anew in each: on real processors, what the same work takes changes from minute to minute.
        sessions = 1 if subject.emulated else _SESSIONS
        profile = subject.profile("cpu", devices, seconds / sessions)
        plans = plans_for(profile, devices, wanted)
        held = [None if subject.emulated else sum(peaks_of(subject, plan)) for plan in plans]
        pairs: list[list[tuple[float, float]]] = [[] for _ in plans]  # for each session, predicted and measured
        with contextlib.ExitStack() as stack:
            titles = [f"{subject.name}, {plan.title} ({number})" for number, plan in enumerate(plans)]
            contestants = {title: subject.contestant(stack, plan) for title, plan in zip(titles, plans, strict=True)}
            for session in range(sessions):
                if session:
                    profile = subject.profile("cpu", devices, seconds / sessions)
                taken = take_turns(contestants, max(1, rounds // sessions), progress, warmup=1 if session else 2)
                for mine, plan, values in zip(pairs, plans, taken.values(), strict=True):
                    mine.append((_predicted(plan, profile), median(values)))
        rows += [_row(subject, plan, mine, live) for plan, mine, live in zip(plans, pairs, held, strict=True)]
    right = []
    for key, what in (("difference", "steps"), ("bytes_difference", "peaks")):
        known = [row[key] for row in rows if row[key] is not None]
        right.append(f"{sum(-UNDER <= value <= OVER for value in known)} of {len(known)} {what}")
    columns = f"{subjects.COLUMNS} | predicted:ms | measured:ms | =difference:+% | held=predicted_bytes:MiB"
    columns += " | measured=measured_bytes:MiB | =bytes_difference:+%"
    verdict = f"within -{UNDER:.0%} and +{OVER:.0%}: {', '.join(right)}"
    return rows, tabulated("prediction", rows, columns, verdict, left=2)


def _predicted(plan: Plan, profile: Profile) -> float:
    """The step of a plan, from another measurement of its layers."""
    stages = make_stages(profile, plan.partition, plan.schedule.placement, plan.mesh, [1.0] * plan.num_devices)
    return float(simulate(plan.schedule, profile.contention.costs(stages.costs, plan.schedule)).makespan)


def peaks_of(subject: Subject, plan: Plan) -> list[int]:
    """Of each device the most bytes that its actions have made and that are there at a time."""
    meters = [StorageMeter() for _ in range(plan.num_devices)]
    inputs, target = subject.batch(plan.minibatch)
    with subject.pipeline(plan, Apart(["cpu"] * len(meters), [meter.on for meter in meters])) as pipe:
        pipe.step(inputs, target)
        before = [meter.live() for meter in meters]  # gradients are there by now
        for meter in meters:
            meter.peak()
        pipe.step(inputs, target)
    return [meter.peak() - there for meter, there in zip(meters, before, strict=True)]


def _row(subject: Subject, plan: Plan, pairs: Sequence[tuple[float, float]], live: int | None) -> dict[str, Any]:
    predicted, measured = median([one for one, _ in pairs]), median([other for _, other in pairs])
    held = None if live is None else sum(held.activations + held.buffers + held.workspace for held in plan.memory)
    off = median([one / other for one, other in pairs]) - 1
    times = {"predicted": predicted, "measured": measured, "difference": off, "sessions": list(pairs)}
    sizes = {"predicted_bytes": held, "measured_bytes": live, "bytes_difference": held and live and held / live - 1}
    return {**subjects.told(subject, plan), **times, **sizes}
