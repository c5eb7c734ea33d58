"""How close a schedule comes to its bound when nothing but the schedule counts.

Every device is emulated: its F, I and W take a given time and no processor. What a step takes beyond the simulated
makespan of its actions is then all overhead, ours or the peer's.

    bound        makespan of the actions as they are run, simulated with these costs
    efficiency   bound / time
    useful       work of a device / time: what is left after bubble and overhead

Our devices are threads of this process, or processes as the peer's are (`torchrun`).
"""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gapless.bench.one_core import on_one_core
from gapless.bench.peer.contest import Contest, loss
from gapless.bench.peer.peer import Peer
from gapless.bench.rounds import Contestant, Progress, median, ratio, silent, take_turns, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.view import text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PEERS = ("1f1b", "interleaved", "zb-v")  # what torch has of these


def run(
    *,
    schedules: Sequence[str],
    devices: int,
    microbatches: int,
    milliseconds: float,
    rounds: int,
    size: int,
    peer: bool,
    torchrun: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000, size=size)
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        ran: dict[str, Schedule] = {}
        refused: dict[str, str] = {}
        if torchrun:
            progress("starting gapless on ranks")
            ours = stack.enter_context(Peer(contest, schedules, "gapless"))
            ran |= {f"gapless {name}": schedule for name, schedule in ours.schedules.items()}
            contestants |= {f"gapless {name}": _their_step(ours, name) for name in ours.schedules}
        else:
            for name in schedules:
                pipe = stack.enter_context(pipeline(contest, name))
                ran[f"gapless {name}"] = pipe.schedule
                contestants[f"gapless {name}"] = step(contest, pipe)
        if peer:
            progress("starting torch.distributed.pipelining")
            torch_ = stack.enter_context(Peer(contest, PEERS))
            ran |= {f"torch {name}": schedule for name, schedule in torch_.schedules.items()}
            contestants |= {f"torch {name}": _their_step(torch_, name) for name in torch_.schedules}
            refused = torch_.refused
        seconds = take_turns(contestants, rounds, progress)
    return {
        "benchmark": "emulated",
        "devices": devices,
        "microbatches": microbatches,
        "milliseconds": milliseconds,
        "size": size,
        "torchrun": torchrun,
        "rows": [_row(name, contest, ran[name], seconds[name]) for name in contestants],
        "refused": refused,
        **_best(seconds),
    }


def pipeline(
    contest: Contest,
    schedule: str,
    *,
    mesh: "DeviceMesh | None" = None,
    costs: Costs | None = None,
    timeline: bool = False,
) -> Pipeline:
    """One layer of the contest per stage."""
    costs = costs or contest.costs
    made = make_schedule(schedule, devices=contest.devices, microbatches=contest.microbatches, costs=costs)
    stages = [contest.stage(made.num_stages // contest.devices) for _ in range(made.num_stages)]
    return Pipeline(
        nn.Sequential(*stages),
        devices=["cpu"] * contest.devices if mesh is None else None,
        mesh=mesh,
        microbatches=contest.microbatches,
        loss=loss,
        schedule=schedule,
        stages_per_device=made.num_stages // contest.devices,
        partition=[1] * made.num_stages,
        costs=costs if contest.kind == "emulated" else None,
        timeline=timeline,
    )


def batch(contest: Contest) -> tuple[Tensor, Tensor]:
    return contest.inputs().requires_grad_(contest.inputs_need_grad), contest.target()


def step(contest: Contest, pipe: Pipeline, times: int = 1) -> Contestant:
    inputs, target = batch(contest)
    with on_one_core():  # the threads start with the first step
        pipe.step(inputs, target)
    return timed(lambda: pipe.step(inputs, target), times)


def _their_step(peer: Peer, name: str) -> Contestant:
    return lambda: peer.step(name)


def _row(name: str, contest: Contest, schedule: Schedule, seconds: list[float]) -> dict[str, Any]:
    by, _, recipe = name.partition(" ")
    predicted = simulate(schedule, contest.costs)
    bound, work, time = float(predicted.makespan), float(predicted.work), median(seconds)
    stated = make_schedule(recipe, devices=contest.devices, microbatches=contest.microbatches, costs=contest.costs)
    return {
        "by": by,
        "schedule": recipe,
        "stages": schedule.num_stages,
        "seconds": time,
        "bound": bound,
        "efficiency": bound / time,
        "useful": work / time,
        "fused": len(_whole(schedule) - _whole(stated)),
        "split": len(_whole(stated) - _whole(schedule)),
        "backwards": schedule.num_stages * schedule.num_microbatches,
        "rounds": seconds,
    }


def _whole(schedule: Schedule) -> set[tuple[int, int]]:
    """The backwards that run as one B."""
    return {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.BACKWARD}


def _best(seconds: dict[str, list[float]]) -> dict[str, Any]:
    ours = {name: values for name, values in seconds.items() if name.startswith("gapless")}
    theirs = {name: values for name, values in seconds.items() if name.startswith("torch")}
    if not ours or not theirs:
        return {"faster": None}
    mine, other = (min(side, key=lambda name: median(side[name])) for side in (ours, theirs))
    return {"best": mine, "best_of_torch": other, "faster": ratio(theirs[other], ours[mine])}


def report(found: dict[str, Any]) -> str:
    headings = ("schedule", "by", "stages", "step", "bound", "efficiency", "useful", "")
    rows = [
        (
            row["schedule"],
            row["by"],
            str(row["stages"]),
            _milliseconds(row["seconds"]),
            _milliseconds(row["bound"]),
            text.percent(row["efficiency"]),
            text.percent(row["useful"]),
            _note(row),
        )
        for row in found["rows"]
    ]
    rounds = len(found["rows"][0]["rounds"])
    lines = [
        (
            f"{found['devices']} emulated devices{', a process each' if found['torchrun'] else ''}, "
            f"{found['microbatches']} microbatches{_size(found['size'])}, "
            f"{found['milliseconds']:g} ms for each F, I and W of a device; medians of {rounds}"
        ),
        "",
        text.table(headings, rows, left=2),
    ]
    lines += [f"torch refuses {name}: {why}" for name, why in found["refused"].items()]
    if found["faster"] is not None:
        lines += [
            "",
            f"{found['best']} is faster than torch's best ({found['best_of_torch']}) by {found['faster']:.2f}x",
        ]
    return "\n".join(lines)


def _size(floats: int) -> str:
    return f" of {4 * floats / 1e6:.2g} MB" if floats >= 1000 else ""


def _note(row: dict[str, Any]) -> str:
    parts = [f"{row[word]} of {row['backwards']} backwards {word}" for word in ("fused", "split") if row[word]]
    return ", ".join(parts)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
