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
gpipe/       the tables of GPipe and of zero bubble: largest, throughput, breakdown, bubbles
planner/     is the planner right? plan and replicas

A benchmark has a file with `run`, which measures and returns JSON values, `report`, which makes text of them, and
`figures`, the numbers that count; some have `tables` too. `run` takes `progress`, and what else it takes are its
options, annotated as `runner.parameters` says. The benchmark is a line in BENCHMARKS and one in ENTRIES of
`runner.suite`.

A speed is never a bare number: it is a ratio to a peer or to a bound, measured in the same run. Contestants take turns,
round by round, so that a busy moment of the machine meets all of them, and what counts is the median.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Benchmark(NamedTuple):
    """Where its file is, what it is about, and options for the example in its help."""

    file: str
    about: str
    example: str


BENCHMARKS = {
    "emulated": Benchmark(
        "emulated",
        "schedules on emulated devices, against their bound and torch.distributed.pipelining",
        "--devices 8 --microbatches 16",
    ),
    "peers": Benchmark(
        "peers",
        "every way to train one model on ranks: pipelines, FSDP2, plain, and independent copies as the limit",
        "--devices 2 --sizes light",
    ),
    "matrix": Benchmark(
        "matrix",
        "our best schedule against every peer's best, on emulated devices of many sizes",
        "--devices 2,4 --keep cells.json",
    ),
    "overhead": Benchmark("overhead", "a pipeline of one device against the plain loop", "--depth 4"),
    "tiny": Benchmark(
        "tiny",
        "the step of tiny layers, where all is overhead, against torch's 1F1B",
        "--microbatches 16",
    ),
    "split": Benchmark(
        "split",
        "the host cost of F + I + W against a plain F + B, and torch's own halves",
        "--width 64",
    ),
    "scale": Benchmark("scale", "generate, verify and simulate ever larger schedules", "--largest 256"),
    "largest": Benchmark(
        "gpipe.largest",
        "GPipe's table of the largest model per device, predicted and measured",
        "--no-measured",
    ),
    "throughput": Benchmark(
        "gpipe.throughput",
        "GPipe's tables of normalised throughput, over fast and slow links, on emulated devices",
        "--devices 2,4 --no-slow",
    ),
    "breakdown": Benchmark(
        "gpipe.breakdown",
        "where the time of a step goes, as measured: compute, recompute, bubble, transfer, update",
        "--devices 4",
    ),
    "bubbles": Benchmark(
        "gpipe.bubbles",
        "zero bubble's table of bubble rates for published times, theirs beside ours",
        "--lines 3",
    ),
    "timeline": Benchmark(
        "timeline",
        "what it costs to record a timeline, and how well a simulation predicts it",
        "--schedule zb-v --html timeline.html",
    ),
    "saving": Benchmark("saving", "what it costs to save in the background while a GPT trains", "--width 256"),
    "plan": Benchmark(
        "planner.plan",
        "a plan's step, memory, cuts and choice against what is measured",
        "--parts cuts,choice",
    ),
    "replicas": Benchmark(
        "planner.replicas",
        "stages and replicas of PipeDream's planner on emulated ranks, against its prediction",
        "--devices 8 --milliseconds 50",
    ),
    "gpu": Benchmark(
        "gpu",
        "ranks on a GPU, against its limit and torch.distributed.pipelining",
        "--ranks 4 --transports memory",
    ),
    "staleness": Benchmark(
        "staleness",
        "what delayed gradients cost: asynchronous ways to train against plain training, on real text",
        "--optimizer sgd --html curves.html",
    ),
    "compile": Benchmark("compile", "a GPT with compiled layers against the eager one", "--width 512 --bf16"),
}


def process_environment() -> dict[str, str]:
    """For a process that imports benchmarks, wherever it runs."""
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def benchmark_module(name: str) -> Any:
    """The module of a benchmark, which loads torch."""
    return import_module(f"benchmarks.{BENCHMARKS[name].file}")
