"""How the cost of a schedule grows with its size: generate, verify and simulate, in time and memory.

Every size runs in a process of its own, so that its peak memory is its own too.

example: python -m benchmarks scale --largest 256
"""

import re
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

from benchmarks.runner.findings import BenchmarkResult, Figure, tabulated
from benchmarks.runner.parameters import Schedule
from benchmarks.runner.rounds import Progress, silent
from gapless import GaplessError, make_schedule, simulate, verify
from gapless.errors import ConfigError

MOST_MICROBATCHES = 1024


def sizes(smallest: int, largest: int) -> list[tuple[int, int]]:
    """(devices, microbatches), the devices doubling."""
    doubled = (smallest << times for times in range((largest // smallest).bit_length()))
    return [(devices, min(4 * devices, MOST_MICROBATCHES)) for devices in doubled]


def run(
    *,
    schedule: Schedule = "zb-h1",
    smallest: Annotated[int, "devices to begin with; they double"] = 16,
    largest: Annotated[int, "devices to end with; microbatches are 4 times as many, at most 1024"] = 1024,
    progress: Progress = silent,
) -> BenchmarkResult:
    """A row for each size, measured in a process of its own, and how far the time per action is from staying the
    same.
    """
    if smallest > largest:
        raise ConfigError(f"--smallest {smallest} is above --largest {largest}")
    rows, figures = [], []
    for devices, microbatches in sizes(smallest, largest):
        progress(f"{devices} devices, {microbatches} microbatches")
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                rows.append(process.submit(measure, schedule, devices, microbatches).result())
        except (GaplessError, BrokenProcessPool) as error:
            why = "its process has ended; out of memory?" if isinstance(error, BrokenProcessPool) else str(error)
            raise GaplessError(f"{schedule} with {devices} devices and {microbatches} microbatches: {why}") from None
        each = rows[-1]["microseconds_per_action"]
        figures.append(Figure(f"all three, K = {devices}, M = {microbatches}", rows[-1]["total"], "s"))
        figures.append(Figure(f"per action, K = {devices}", each, "us", meant="flat"))
    more, growth = (rows[-1][key] / rows[0][key] for key in ("actions", "microseconds_per_action"))
    verdict = [f"{more:,.0f} times the actions, {growth:.2f} times the time per action (1 is linear)"]
    columns = "K=devices | M=microbatches | actions:, | generate:s | verify:s | simulate:s | total:s"
    columns += " | us per action=microseconds_per_action:,.2 | peak memory=peak_bytes:MiB.0"
    title = f"{schedule}, K devices, M microbatches"
    table = tabulated(title, rows, columns, *(verdict if len(rows) > 1 else []), left=0)
    return BenchmarkResult({"rows": rows}, figures, [table])


def measure(schedule: str, devices: int, microbatches: int) -> dict[str, Any]:
    """In this process, whose memory is taken as it is."""
    start = time.perf_counter()
    made = make_schedule(schedule, devices=devices, microbatches=microbatches)
    generated = time.perf_counter()
    verify(made).raise_if_wrong()
    verified = time.perf_counter()
    makespan = float(simulate(made).makespan)
    end = time.perf_counter()
    sizes = {"devices": devices, "microbatches": microbatches, "actions": made.num_actions, "makespan": makespan}
    parts = {"generate": generated - start, "verify": verified - generated, "simulate": end - verified}
    each = {"microseconds_per_action": 1e6 * (end - start) / made.num_actions, "peak_bytes": peak_bytes()}
    return {**sizes, **parts, "total": end - start, **each}


def peak_bytes() -> int:
    """The most memory this process ever had. Linux counts a parent's into `getrusage`, but not here."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s*(\d+)", status.read_text("ascii", "replace"), re.MULTILINE)):
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
