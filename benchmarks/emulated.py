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
from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Devices, Microbatches, Milliseconds, Rounds, Schedules
from benchmarks.runner.rounds import Progress, best, median, quotients, silent, take_turns
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
) -> BenchmarkResult:
    """Ours and torch's take turns; a row for each says what was run, its bound and its median step. What counts is the
    efficiency of each, and how much faster our best is than torch's.
    """
    contest = Contest(devices, microbatches, "emulated", seconds=milliseconds / 1000, size=size)
    with Lineup(contest, progress) as lineup:
        if torchrun:
            lineup.add_ranks("gapless", schedules)
        else:
            lineup.add_here(schedules)
        if peer:
            lineup.add_ranks("torch", PEERS)
        seconds = take_turns(lineup.contestants, rounds, progress)
    rows, figures, found = [], [], best(seconds)
    for name, taken in seconds.items():
        by, _, recipe = name.partition(" ")
        rows.append(_row(by, recipe, contest, lineup.schedules[name], taken))
        known = _MEANT.get(recipe) if by == "gapless" and milliseconds == 5 else None
        meant = f"at least {known[torchrun]:.0%}" if known else ""
        shares = [rows[-1]["bound"] / each for each in taken]
        figures.append(of_rounds(f"efficiency of {name}", shares, "share", "more", meant, by))
    if found["faster"] is not None:
        gains = quotients(seconds[found["best_of_torch"]], seconds[found["best"]])
        figures.append(of_rounds("faster than torch's best by", gains, "x", "more", "above 1"))
    refused = {name.partition(" ")[2]: why for name, why in lineup.refused.items()}
    verdict = [*(f"torch's {name} is left out: {why}" for name, why in refused.items()), *found["verdict"]]
    columns = "schedule | by | stages | step=seconds:ms | bound:ms | efficiency:% | useful:% | =passes"
    title = f"{contest.title(', a process each' * torchrun)}; medians of {rounds}"
    table = tabulated(title, rows, columns, *verdict, left=2)
    return BenchmarkResult({"rows": rows, "refused": refused, **found}, figures, [table])


def _row(by: str, recipe: str, contest: Contest, schedule: Schedule, seconds: list[float]) -> dict[str, Any]:
    bound = work = 3 * contest.seconds * contest.microbatches  # no device can do less than its own F, I and W
    passes = ""
    if has_steps(recipe):
        predicted = simulate(schedule, contest.costs)
        bound, work = float(predicted.makespan), float(predicted.work)
        stated = make_schedule(recipe, devices=contest.devices, microbatches=contest.microbatches, costs=contest.costs)
        here, there = _whole(schedule), _whole(stated)
        count = schedule.num_stages * schedule.num_microbatches
        words = {"fused": len(here - there), "split": len(there - here)}
        passes = ", ".join(f"{some} of {count} backwards {word}" for word, some in words.items() if some)
    step = median(seconds)
    found = {"by": by, "schedule": recipe, "stages": schedule.num_stages, "rounds": seconds, "seconds": step}
    return {**found, "bound": bound, "efficiency": bound / step, "useful": work / step, "passes": passes}


def _whole(schedule: Schedule) -> set[tuple[int, int]]:
    """The backwards that run as one B."""
    return {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind is Kind.BACKWARD}
