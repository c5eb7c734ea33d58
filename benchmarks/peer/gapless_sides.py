"""gapless as a contestant: its pipelines in this process, and under a mesh on a rank.

Schedules without an end, pipedream and 2bw, are measured in their steady state: what M microbatches take there stands
for a step, less what updates and copies of weights take of a processor: while it makes them a device is busy too.
Backwards are split, so that a gradient leaves before those of the weights are computed.
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peer.contest import Contest
from benchmarks.runner.rounds import Contestant, Span, timed
from gapless import Costs, Pipeline, make_schedule
from gapless.run.world import TransportName
from gapless.schedule.recipes import find_recipe


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Threads that start in here stay on one core; the caller is back on all of them afterwards.

    For threads that wait more than they compute: emulated devices, and layers too small to matter. They wake on
    whichever core is free, and the interpreter's lock and the caches travel with them, which is what such a benchmark
    would measure. Layers of a real model keep a core busy, and gain nothing from it.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def pipeline(contest: Contest, schedule: str, mesh: Any = None, costs: Costs | None = None, **options: Any) -> Pipeline:
    """One layer of the contest per stage."""
    costs = costs or contest.costs
    microbatches = 1 if schedule == "pipedream" else contest.microbatches
    made = make_schedule(schedule, devices=contest.devices, microbatches=microbatches, costs=costs)
    stages = [contest.stage(made.num_stages // contest.devices) for _ in range(made.num_stages)]
    options |= {"devices": ["cpu"] * contest.devices if mesh is None else None, "mesh": mesh, "loss": contest.loss}
    options |= {"stages_per_device": made.num_stages // contest.devices, "partition": [1] * made.num_stages}
    options["costs"] = costs if contest.kind == "emulated" else None
    return Pipeline(nn.Sequential(*stages), schedule=schedule, microbatches=microbatches, **options)


def batch(contest: Contest) -> tuple[Tensor, Tensor]:
    """Inputs and target; the inputs require a gradient where that takes time too."""
    return contest.inputs().requires_grad_(contest.inputs_need_grad), contest.target()


def step(contest: Contest, pipe: Pipeline, times: int = 1, *, on_all_cores: bool = False) -> Contestant:
    """A contestant that runs so many steps in a row, all on the same batch; `on_all_cores` is for layers that work."""
    inputs, target = batch(contest)
    with contextlib.nullcontext() if on_all_cores else on_one_core():  # the threads start with the first step
        if not has_steps(pipe.schedule.name):
            run = steadily(contest, pipe, inputs, target)
            run()
            return lambda: run().seconds
        pipe.step(inputs, target)
    return timed(lambda: pipe.step(inputs, target), times)


def has_steps(schedule: str) -> bool:
    """Or it has no end."""
    return find_recipe(schedule).synchronous


def steadily(contest: Contest, pipe: Pipeline, inputs: Tensor, target: Tensor) -> Callable[[], Span]:
    """A stream that goes on for a while, and then for as many microbatches as a step has."""
    if pipe.microbatches == 1:
        inputs, target = inputs[: contest.samples], target[: contest.samples]
    count, depth = (-(-each // pipe.microbatches) for each in (contest.microbatches, contest.devices))
    # What the last turn has left under way comes first, and until devices are busy again.
    return streaming(pipe, (inputs, target), 3 * depth + 2, count, less_updates=True)


def streaming(pipe: Pipeline, batch: Any, first: int, count: int, *, less_updates: bool = False) -> Callable[[], Span]:
    """Goes on with a stream for so many minibatches, and then for others, which are the span."""
    stream = pipe.stream(optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9), split=True)
    results = stream.run(itertools.repeat(batch))

    def run() -> Span:  # which also keeps the pipeline
        for _ in range(first):
            next(results)
        start, updates = time.perf_counter(), sum(stream.update_seconds)
        for _ in range(count):
            next(results)
        updates = (sum(stream.update_seconds) - updates) / len(stream.update_seconds) if less_updates else 0.0
        return Span(start + updates, time.perf_counter())

    return run


def prepare_gapless(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """The order of the actions as they are run, and a call that runs one step on this rank. A name is that of a
    schedule, and may say over which transport, that shapes are "static", that its actions are "graphed" as CUDA graphs,
    and that the step is "timed": its timeline is recorded. "default" is the pipeline that one gets without any option.
    """
    torch.manual_seed(0)  # every rank makes the same weights
    asked, *words = name.split()
    has = {word: word in words for word in ("static", "timed", "graphed")}
    over = cast(TransportName, words[1] if "over" in words else "auto")
    mesh = init_device_mesh(contest.device.type, (contest.devices,), mesh_dim_names=("pp",))
    shapes = has["static"] or ("auto" if contest.kind == "llama" else False)
    more: Any = {"static_shapes": shapes, "timeline": has["timed"], "graphs": has["graphed"], "transport": over}
    more = {} if asked == "default" else {"schedule": asked, **more}
    if contest.kind == "llama":
        return _llama(contest, mesh, more)
    pipe = pipeline(contest, mesh=mesh, **more)
    inputs, target = batch(contest)
    if not has_steps(asked):
        return pipe.schedule.text(), steadily(contest, pipe, inputs, target)
    for _ in range(contest.first_steps if has["graphed"] or not has["timed"] else 0):
        pipe.step(inputs, target)
    if has["graphed"]:
        _check_graphs(pipe, contest.devices)
    return pipe.schedule.text(), lambda: pipe.step(inputs, target)


def _check_graphs(pipe: Pipeline, ranks: int) -> None:
    found: list[str] = [""] * ranks
    dist.all_gather_object(found, next((line for line in repr(pipe).splitlines() if "no graphs" in line), ""))
    if any(found):
        raise ValueError(next(filter(None, found)).strip())


def _llama(contest: Contest, mesh: Any, options: Mapping[str, Any]) -> tuple[str | None, Callable[[], object]]:
    """As people have it: the whole model is given, and cut by the pipeline."""
    batch: Any = {"input_ids": contest.inputs(), "labels": contest.target()}
    made = {"microbatches": contest.microbatches, "compile": contest.compiled, **options}
    pipe = Pipeline(contest.llama(contest.layers * contest.devices).cpu(), mesh=mesh, **made)
    with contest.casting():
        pipe.step(batch)
    pipe.zero_grad()
    step = contest.trained(pipe.parameters(), lambda: pipe.step(batch))
    for _ in range(contest.first_steps):
        step()
    print(pipe, flush=True)
    if options.get("graphs") is True:
        _check_graphs(pipe, contest.devices)
    return pipe.schedule.text(), step
