"""How close a schedule comes to its bound when nothing but the schedule counts.

Every device is emulated: its F, I and W take a given time and no processor. What a step takes beyond the simulated
makespan of its actions is then all overhead, ours or the peer's.

    bound        makespan of the actions as they are run, simulated with these costs
    efficiency   bound / time
    useful       work of a device / time: what is left after bubble and overhead

Our devices are threads of this process, or processes as the peer's are (`torchrun`).

Schedules without an end, pipedream and 2bw, are measured in their steady state: what M microbatches take there, but for
updates, is their step, and the work of a device is the bound.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import Tensor, nn

from benchmarks.peer.contest import Contest
from benchmarks.peer.one_core import on_one_core
from benchmarks.peer.peer import Peer
from benchmarks.peer.steady import has_steps, steadily, steady_figures
from benchmarks.runner.outcome import Figure, of_rounds, quotients
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedules
from benchmarks.runner.report import milliseconds as in_ms
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Contestant, Progress, median, ratio, silent, take_turns, timed
from gapless.pipeline.pipeline import Pipeline
from gapless.run.world import TransportName
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
    schedules: Schedules = ("1f1b", "zb-h1", "interleaved", "zb-v"),
    devices: Devices = 8,
    microbatches: Microbatches = 16,
    milliseconds: Milliseconds = 5,
    rounds: Rounds = 5,
    size: Annotated[int, "floats that a sample carries from stage to stage"] = 1,
    torchrun: Annotated[bool, "run each device in its own process, over Gloo, as torchrun does"] = False,
    peer: Annotated[bool, "leave out torch.distributed.pipelining"] = True,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Ours and torch's take turns; a row for each says what was run, its bound and its median step."""
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000, size=size)
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        ran: dict[str, Schedule] = {}
        peers: list[Peer] = []

        def on_ranks(by: Literal["gapless", "torch"], names: Sequence[str]) -> None:
            progress(f"starting {by} on ranks")
            ranks = stack.enter_context(Peer(contest, names, by))
            for name, schedule in ranks.schedules.items():
                ran[f"{by} {name}"] = schedule
                contestants[f"{by} {name}"] = partial(ranks.step, name)
            peers.append(ranks)

        if torchrun:
            on_ranks("gapless", schedules)
        else:
            for name in schedules:
                pipe = stack.enter_context(pipeline(contest, name))
                ran[f"gapless {name}"] = pipe.schedule
                contestants[f"gapless {name}"] = step(contest, pipe) if has_steps(name) else _steady(contest, pipe)
        if peer:
            on_ranks("torch", PEERS)
        seconds = take_turns(contestants, rounds, progress)
    return {
        "rows": [_row(name, contest, ran[name], values) for name, values in seconds.items()],
        "refused": {name: why for each in peers for name, why in each.refused.items()},
        **_best(seconds),
    }


def pipeline(
    contest: Contest,
    schedule: str,
    *,
    mesh: "DeviceMesh | None" = None,
    costs: Costs | None = None,
    timeline: bool = False,
    transport: TransportName = "auto",
    static_shapes: bool = False,
    graphs: bool = False,
) -> Pipeline:
    """One layer of the contest per stage."""
    costs = costs or contest.costs
    microbatches = 1 if schedule == "pipedream" else contest.microbatches
    made = make_schedule(schedule, devices=contest.devices, microbatches=microbatches, costs=costs)
    stages = [contest.stage(made.num_stages // contest.devices) for _ in range(made.num_stages)]
    return Pipeline(
        nn.Sequential(*stages),
        devices=["cpu"] * contest.devices if mesh is None else None,
        mesh=mesh,
        microbatches=microbatches,
        loss=contest.loss,
        schedule=schedule,
        stages_per_device=made.num_stages // contest.devices,
        partition=[1] * made.num_stages,
        costs=costs if contest.kind == "emulated" else None,
        timeline=timeline,
        transport=transport,
        static_shapes=static_shapes,
        graphs=graphs,
    )


def batch(contest: Contest) -> tuple[Tensor, Tensor]:
    """Inputs and target; the inputs require a gradient where that takes time too."""
    return contest.inputs().requires_grad_(contest.inputs_need_grad), contest.target()


def step(contest: Contest, pipe: Pipeline, times: int = 1, *, on_all_cores: bool = False) -> Contestant:
    """A contestant that runs so many steps in a row, all on the same batch; `on_all_cores` is for layers that work."""
    inputs, target = batch(contest)
    with contextlib.nullcontext() if on_all_cores else on_one_core():  # the threads start with the first step
        pipe.step(inputs, target)
    return timed(lambda: pipe.step(inputs, target), times)


def _steady(contest: Contest, pipe: Pipeline) -> Contestant:
    with on_one_core():  # the threads start with the stream
        run = steadily(contest, pipe, *batch(contest))
        run()
    return lambda: run().seconds


def _row(name: str, contest: Contest, schedule: Schedule, seconds: list[float]) -> dict[str, Any]:
    by, _, recipe = name.partition(" ")
    if not has_steps(recipe):
        return {"by": by, "schedule": recipe, "stages": schedule.num_stages, **steady_figures(contest, seconds)}
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
    """A row for each schedule and side, what torch refuses, and which side has the fastest."""
    rows = [
        (
            row["schedule"],
            row["by"],
            str(row["stages"]),
            *(in_ms(row[key]) for key in ("seconds", "bound")),
            *(text.percent(row[key]) for key in ("efficiency", "useful")),
            ", ".join(
                f"{row[word]} of {row['backwards']} backwards {word}" for word in ("fused", "split") if row[word]
            ),
        )
        for row in found["rows"]
    ]
    verdict = [f"torch's {name} is left out: {why}" for name, why in found["refused"].items()]
    if found["faster"] is not None:
        best, theirs = found["best"], found["best_of_torch"]
        verdict += ["", f"{best} is faster than torch's best ({theirs}) by {found['faster']:.2f}x"]
    size = f" of {4 * found['size'] / 1e6:.2g} MB" if found["size"] >= 1000 else ""
    return tabular(
        f"{found['devices']} emulated devices{', a process each' if found['torchrun'] else ''}, "
        f"{found['microbatches']} microbatches{size}, {found['milliseconds']:g} ms for each F, I and W of a device; "
        f"medians of {len(found['rows'][0]['rounds'])}",
        ("schedule", "by", "stages", "step", "bound", "efficiency", "useful", ""),
        rows,
        *verdict,
        left=2,
    )


_MEANT = {"1f1b": (0.95, 0.91), "zb-h1": (0.95, 0.91), "interleaved": (0.93, 0.9), "zb-v": (0.93, 0.9)}  # at 5 ms


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """The efficiency of each schedule of each side, and how much faster our best is than each peer's."""
    shown = []
    for row in found["rows"]:
        efficiencies = [row["bound"] / seconds for seconds in row["rounds"]]
        meant = ""
        if row["by"] == "gapless" and found["milliseconds"] == 5 and row["schedule"] in _MEANT:
            meant = f"at least {_MEANT[row['schedule']][found['torchrun']]:.0%}"
        name = f"efficiency of {row['by']} {row['schedule']}"
        shown.append(of_rounds(name, efficiencies, "share", "more", meant, row["by"]))
    if found["faster"] is not None:
        rounds = {f"{row['by']} {row['schedule']}": row["rounds"] for row in found["rows"]}
        gains = quotients(rounds[found["best_of_torch"]], rounds[found["best"]])
        shown.append(of_rounds("faster than torch's best by", gains, "x", "more", "above 1"))
    return shown
