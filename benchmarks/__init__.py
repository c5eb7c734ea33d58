"""The benchmarks, which are run from the repository: `python -m benchmarks NAME`.

__main__     the program
runner/      what they share: options, rounds, results, tables and pages; its `command` reads the command line
peer/        torch.distributed.pipelining, and gapless itself, in processes of their own
emulated     schedules on emulated devices, against their bound and against torch
peers        every way to train one model on ranks, and when a pipeline is the wrong one
matrix       our best against every peer's best, for many sizes
gpu          ranks on a GPU, against its limit and against torch
overhead     one device against the plain loop
tiny         tiny layers, where all is overhead, against torch
split        what it costs the host to split a backward
scale        generate, verify and simulate ever larger schedules
timeline     what recording costs, and whether a simulation agrees with the record
saving       what a save in the background costs
staleness    what delayed gradients cost, on real text
compile      compiled layers against eager ones
gpipe/       the tables of GPipe and of zero bubble: largest, offload, throughput, breakdown, bubbles,
             overlap
planner/     is the planner right? plan and replicas

A benchmark has a file with `run`, which measures and returns a `BenchmarkResult`: JSON values, figures and tables.
`run` takes `progress`, and what else it takes are its options, annotated as `runner.parameters` says. The docstring of
the file is its help. The benchmark is an entry of benchmarks.toml.

A speed is never a bare number: it is a ratio to a peer or to a bound, measured in the same run. Contestants take turns,
round by round, so that a busy moment of the machine meets all of them, and what counts is the median.
"""

import ctypes
import signal
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_TABLE = tomllib.loads((Path(__file__).parent / "benchmarks.toml").read_text("utf-8"))
BENCHMARKS: dict[str, str] = {name: each["about"] for name, each in _TABLE.items() if "about" in each}


class Entry(NamedTuple):
    """A part of `python -m benchmarks all`: a benchmark with words for its command line; see benchmarks.toml."""

    benchmark: str
    quick: str
    words: str = ""


ENTRIES = {key: Entry(each.get("benchmark", key), each["quick"], each.get("words", "")) for key, each in _TABLE.items()}


def benchmark_file(name: str) -> Path:
    """Its file, which has its name and may be in a folder."""
    return next(Path(__file__).parent.rglob(f"{name}.py"))


def benchmark_module(name: str) -> Any:
    """Its module, which loads torch."""
    place = benchmark_file(name).relative_to(Path(__file__).parents[1])
    return import_module(".".join(place.with_suffix("").parts))


def die_with_parent() -> None:
    """Be killed when whoever started this process has gone; for where nothing else would tell it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
