"""How close a schedule comes to its bound when nothing but the schedule counts.

Every device is emulated: its F, I and W take a given time and no processor. What a step takes beyond the simulated
makespan of its actions is then all overhead, ours or the peer's.

    bound        makespan of the actions as they are run, simulated with these costs
    efficiency   bound / time
    useful       work of a device / time: what is left after bubble and overhead

Our devices are threads of this process, or processes as the peer's are (`torchrun`).

Schedules without an end, pipedream and 2bw, are measured in their steady state: what M microbatches take there, but for
updates, is their step, and the work of a device is the bound.

example: python -m benchmarks emulated --devices 8 --microbatches 16
"""

from typing import Annotated, Any

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import has_steps
from benchmarks.peer.peer import Lineup
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedules
from benchmarks.runner.rounds import Progress, best, median, quotients, silent, take_turns
from benchmarks.runner.told import Found, Told, of_rounds, tabulated
from gapless import Schedule, make_schedule, simulate
from gapless.schedule.action import Kind

PEERS = ("1f1b", "interleaved", "zb-v")  # what torch has of these
_MEANT = {"1f1b": (0.95, 0.91), "zb-h1": (0.95, 0.91), "interleaved": (0.93, 0.9), "zb-v": (0.93, 0.9)}  # at 5 ms


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
) -> Found:
    """Ours and torch's take turns; a row for each says what was run, its bound and its median step."""
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000, size=size)
    with Lineup(contest, progress) as lineup:
        if torchrun:
            lineup.add_ranks("gapless", schedules)
        else:
            lineup.add_here(schedules)
        if peer:
            lineup.add_ranks("torch", PEERS)
        seconds = take_turns(lineup.contestants, rounds, progress)
    refused = {name.partition(" ")[2]: why for name, why in lineup.refused.items()}
    rows = [_row(name, contest, lineup.schedules[name], values) for name, values in seconds.items()]
    return {"rows": rows, "refused": refused, **best(seconds)}


def _row(name: str, contest: Contest, schedule: Schedule, seconds: list[float]) -> dict[str, Any]:
    by, _, recipe = name.partition(" ")
    bound = work = 3 * contest.seconds * contest.microbatches  # no device can do less than its own F, I and W
    passes = {"fused": 0, "split": 0, "backwards": 0}
    if has_steps(recipe):
        predicted = simulate(schedule, contest.costs)
        bound, work = float(predicted.makespan), float(predicted.work)
        stated = make_schedule(recipe, devices=contest.devices, microbatches=contest.microbatches, costs=contest.costs)
        here, there = _whole(schedule), _whole(stated)
        passes = {"fused": len(here - there), "split": len(there - here)}
        passes["backwards"] = schedule.num_stages * schedule.num_microbatches
    found = {"by": by, "schedule": recipe, "stages": schedule.num_stages, "rounds": seconds, "seconds": median(seconds)}
    return {**found, "bound": bound, "efficiency": bound / median(seconds), "useful": work / median(seconds), **passes}


def _whole(schedule: Schedule) -> set[tuple[int, int]]:
    """The backwards that run as one B."""
    return {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.BACKWARD}


def told(found: Found) -> Told:
    """A row for each schedule and side, what torch refuses, and which side has the fastest. What counts is the
    efficiency of each, and how much faster our best is than torch's.
    """
    rows, figures = [], []
    for row in found["rows"]:
        passes = [f"{row[word]} of {row['backwards']} backwards {word}" for word in ("fused", "split") if row[word]]
        rows.append({**row, "passes": ", ".join(passes)})
        meant = ""
        if row["by"] == "gapless" and found["milliseconds"] == 5 and row["schedule"] in _MEANT:
            meant = f"at least {_MEANT[row['schedule']][found['torchrun']]:.0%}"
        shares = [row["bound"] / seconds for seconds in row["rounds"]]
        name = f"efficiency of {row['by']} {row['schedule']}"
        figures.append(of_rounds(name, shares, "share", "more", meant, row["by"]))
    verdict = [f"torch's {name} is left out: {why}" for name, why in found["refused"].items()]
    if found["faster"] is not None:
        ours, theirs = found["best"], found["best_of_torch"]
        rounds = {f"{row['by']} {row['schedule']}": row["rounds"] for row in rows}
        gains = quotients(rounds[theirs], rounds[ours])
        figures.append(of_rounds("faster than torch's best by", gains, "x", "more", "above 1"))
        verdict.append(f"{ours} is faster than torch's best ({theirs}) by {found['faster']:.2f}x")
    size = f" of {4 * found['size'] / 1e6:.2g} MB" if found["size"] >= 1000 else ""
    title = f"{{devices}} emulated devices{', a process each' * found['torchrun']}, {{microbatches}} microbatches{size}"
    title += f", {{milliseconds:g}} ms for each F, I and W of a device; medians of {len(rows[0]['rounds'])}"
    columns = "schedule | by | stages | step=seconds:ms | bound:ms | efficiency:% | useful:% | =passes"
    return Told(figures, [tabulated(title.format_map(found), rows, columns, *verdict, left=2)])
