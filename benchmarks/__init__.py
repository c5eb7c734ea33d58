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

A benchmark has a file with `run`, which measures and returns JSON values, and `told`, which makes figures and tables of
them. `run` takes `progress`, and what else it takes are its options, annotated as `runner.parameters` says. The
docstring of the file is its help. The benchmark is a line in BENCHMARKS and one in ENTRIES of `runner.suite`.

A speed is never a bare number: it is a ratio to a peer or to a bound, measured in the same run. Contestants take turns,
round by round, so that a busy moment of the machine meets all of them, and what counts is the median.
"""

import ctypes
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "emulated": "schedules on emulated devices, against their bound and torch.distributed.pipelining",
    "overlap": "an optimizer step that does not wait, on emulated devices, against the span and one that waits",
    "peers": "every way to train one model on ranks: pipelines, FSDP2, plain, and independent copies as the limit",
    "matrix": "our best schedule against every peer's best, on emulated devices of many sizes",
    "overhead": "a pipeline of one device against the plain loop",
    "tiny": "the step of tiny layers, where all is overhead, against torch's 1F1B",
    "split": "the host cost of F + I + W against a plain F + B, and torch's own halves",
    "scale": "generate, verify and simulate ever larger schedules",
    "largest": "GPipe's table of the largest model per device, predicted and measured",
    "offload": "the largest GPT per device with remat, offload, both, and the optimizer's state on the host",
    "throughput": "GPipe's tables of normalised throughput, over fast and slow links, on emulated devices",
    "breakdown": "where the time of a step goes, as measured: compute, recompute, bubble, transfer, update",
    "bubbles": "zero bubble's table of bubble rates for published times, theirs beside ours",
    "timeline": "what it costs to record a timeline, and how well a simulation predicts it",
    "saving": "what it costs to save in the background while a GPT trains",
    "plan": "a plan's step, memory, cuts and choice against what is measured",
    "replicas": "stages and replicas of PipeDream's planner on emulated ranks, against its prediction",
    "gpu": "ranks on a GPU, against its limit and torch.distributed.pipelining",
    "staleness": "what delayed gradients cost: asynchronous ways to train against plain training, on real text",
    "compile": "a GPT with compiled layers against the eager one",
}


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
