"""How the cost of a schedule grows with its size: generate, verify and simulate, in time and memory.

Every size runs in a process of its own, so that its peak memory is its own too.
"""

import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from benchmarks import process_environment
from benchmarks.runner.outcome import Figure
from benchmarks.runner.parameters import Schedule
from benchmarks.runner.report import tabular
from benchmarks.runner.rounds import Progress, silent
from gapless.errors import ConfigError, GaplessError
from gapless.schedule.recipes import make_schedule
from gapless.schedule.simulate import simulate
from gapless.schedule.verify import verify

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
) -> dict[str, Any]:
    """A row for each size, measured in a process of its own."""
    if smallest > largest:
        raise ConfigError(f"--smallest {smallest} is above --largest {largest}")
    rows = []
    for devices, microbatches in sizes(smallest, largest):
        progress(f"{devices} devices, {microbatches} microbatches")
        words = [sys.executable, "-m", "benchmarks.scale", schedule, str(devices), str(microbatches)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, env=process_environment(), capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            progress("")
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}; out of memory?"])[-1]
            raise GaplessError(f"{schedule} with {devices} devices and {microbatches} microbatches: {last}")
        rows.append(json.loads(done.stdout))
    progress("")
    return {"rows": rows}


def measure(schedule: str, devices: int, microbatches: int) -> dict[str, Any]:
    """In this process, whose memory is taken as it is."""
    marks = [time.perf_counter()]
    made = make_schedule(schedule, devices=devices, microbatches=microbatches)
    marks.append(time.perf_counter())
    verify(made).raise_if_wrong()
    marks.append(time.perf_counter())
    makespan = simulate(made).makespan
    marks.append(time.perf_counter())
    generated, verified, simulated = (after - before for before, after in itertools.pairwise(marks))
    total = marks[-1] - marks[0]
    return {
        "devices": devices,
        "microbatches": microbatches,
        "actions": made.num_actions,
        "generate": generated,
        "verify": verified,
        "simulate": simulated,
        "total": total,
        "microseconds_per_action": 1e6 * total / made.num_actions,
        "peak_bytes": peak_bytes(),
        "makespan": float(makespan),
    }


def peak_bytes() -> int:
    """The most memory this process ever had. Linux counts a parent's into `getrusage`, but not here."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text("ascii", "replace").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def report(found: dict[str, Any]) -> str:
    """A row for each size, and how far the time per action is from staying the same."""
    rows = [
        (
            str(row["devices"]),
            str(row["microbatches"]),
            f"{row['actions']:,}",
            *(f"{row[part]:.2f} s" for part in ("generate", "verify", "simulate", "total")),
            f"{row['microseconds_per_action']:.2f}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
        )
        for row in found["rows"]
    ]
    first, last = found["rows"][0], found["rows"][-1]
    growth = last["microseconds_per_action"] / first["microseconds_per_action"]
    more = last["actions"] / first["actions"]
    grown = f"{more:,.0f} times the actions, {growth:.2f} times the time per action (1 is linear)"
    return tabular(
        f"{found['schedule']}, K devices, M microbatches",
        ("K", "M", "actions", "generate", "verify", "simulate", "total", "us per action", "peak memory"),
        rows,
        *(["", grown] if len(rows) > 1 else []),
        left=0,
    )


def figures(found: Mapping[str, Any]) -> list[Figure]:
    """Measured once each, so they have no rounds."""
    return [
        figure
        for row in found["rows"]
        for figure in (
            Figure(f"all three, K = {row['devices']}, M = {row['microbatches']}", row["total"], "s"),
            Figure(f"per action, K = {row['devices']}", row["microseconds_per_action"], "us", meant="flat"),
        )
    ]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
