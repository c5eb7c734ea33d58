"""What the layers of a model cost, measured: every layer is run as a stage of its own, as a pipeline would run it.

On the CPU as many threads measure as devices will run there: first one at a time, then all side by side, which tells
how much longer they take then. What counts is the median of what a layer takes alone. What it takes to begin a stage
is told by the difference between layers one by one and the same layers as one stage. Copies of the layers are
measured: the model stays as it is.
"""

import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.model.layers import is_sequence
from gapless.model.traced.capture import own_loss
from gapless.plan.profile.contention import ALONE, Contention
from gapless.plan.profile.meter import PAGE, allocator_slack
from gapless.plan.profile.profile import SLACK, EntryTime, Layer, Link, Profile, Seconds, Sizes
from gapless.plan.profile.runner import Runner, Times
from gapless.plan.profile.sizes import fake_sizes, measured_sizes
from gapless.plan.profile.task import Optimizer, Task, moved
from gapless.plan.profile.traced import Tracer
from gapless.slow_work import slow_work
from gapless.stage.autocast import AutocastState
from gapless.stage.batch import microbatch as mb
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.norm.running_statistics import BatchNorm

_LEAST, _MOST = 5, 25  # rounds
_MORE = 3  # times as many of stages beside each other
_PAUSE = 0.5  # at most, between them, of what they take
_OWN = 0.1  # at least, of the time of the smallest layer, that is its own and not what it takes to begin


def measure(
    model: nn.Module | Sequence[Callable[..., Any]],
    inputs: Any,
    target: Any = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: torch.device | str = "cpu",
    side_by_side: int = 1,
    **options: Any,
) -> Profile:
    """The profile of a model for this microbatch on this device: what each layer costs. A module that is not a
    sequence of layers is traced, and its graph is cut into pieces of about equal cost.

    side_by_side  how many such devices will share this machine's processors
    threads       intra-op threads of a CPU device; the caller's unless given
    seconds       about how long to measure (default 10); at least five rounds
    optimizer     makes the optimizer whose state and step are measured (default AdamW); None for one without either
    batchnorm     as in a Pipeline
    name, names   of the profile, and of the layers; by default their classes
    sizes_alone   nothing is run: bytes come from tensors without data, and every time is 0
    flops         nothing is run, and times are FLOPs at this speed, in FLOP/s: for devices that you do not have
    """
    layers: Any = model
    taken, options = inputs, {"loss": loss, "device": device, "side_by_side": side_by_side, **options}
    if not is_sequence(model):
        assert isinstance(model, nn.Module)
        with slow_work("tracing the model"):
            graph, taken = Tracer(model, torch.device(device), side_by_side).graph(inputs)
        layers, options = graph.layers, {"names": graph.names, **options, "loss": loss or own_loss}
    with slow_work("measuring layers"):
        found = measure_layers(layers, taken, target, **options)
    return replace(found, samples=mb.batch_size(inputs))


def measure_layers(
    model: Sequence[Callable[..., Any]],
    inputs: Any,
    target: Any = None,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    device: torch.device | str = "cpu",
    optimizer: Optimizer | None = torch.optim.AdamW,
    batchnorm: BatchNorm = "microbatch",
    threads: int | None = None,
    side_by_side: int = 1,
    seconds: float = 10.0,
    sizes_alone: bool = False,
    flops: float | None = None,
    name: str = "",
    names: Sequence[str] | None = None,
) -> Profile:
    """As `measure`, of layers one after another, and without a word."""
    if not len(model):
        raise ConfigError("there are no layers to measure: give at least 1")
    if flops is not None and not 0 < flops < math.inf:
        raise ConfigError(f"flops is {flops!r}, but it must be a number above 0, in FLOP/s")
    device = torch.device(device)
    task = Task(list(model), moved(inputs, device), moved(target, device), loss, batchnorm, device, optimizer)
    threads = threads or torch.get_num_threads()
    if sizes_alone or flops:
        sized = fake_sizes(task)
        times, entry, contention = sized.times(flops) if flops else Times(), EntryTime(), ALONE
    else:
        with intra_op_threads(threads):
            sized = measured_sizes(task)
        times, entry, contention = _timed(task, threads, side_by_side, seconds)
    names = [type(layer).__name__ for layer in model] if names is None else names
    return Profile(
        name=name,
        layers=tuple(
            _layer(f"{number}.{each}", number, size, times, entry)
            for number, (each, size) in enumerate(zip(names, sized.sizes, strict=True))
        ),
        samples=mb.batch_size(inputs),
        input=sized.input,
        reserved=PAGE if device.type == "cuda" else 0,
        slack=allocator_slack(device) if not (sizes_alone or flops) else SLACK,
        device=str(device) if device.type != "cpu" else f"cpu, {threads} thread{'s' if threads > 1 else ''}",
        entry=entry,
        contention=contention,
    )


def _layer(name: str, number: int, size: Sizes, times: Times, entry: EntryTime) -> Layer:
    def seconds(letter: str, begin: float = 0.0) -> Seconds:
        found = times.of(number, letter)
        return Seconds(max(_OWN * found.median, found.median - begin), found.spread)

    forward, input_grad = seconds("F", entry.forward), seconds("I", entry.backward)
    recording = max(0.0, times.of(number, "f").median - times.of(number, "F").median)
    return Layer(
        name=name,
        forward=forward,
        # What it takes the forward to record for W: only a backward in halves needs that, so it counts there.
        input_grad=Seconds(input_grad.median + recording, input_grad.spread),
        weight_grad=seconds("W"),
        backward=seconds("B", entry.backward),
        recompute=seconds("R", entry.forward),
        update=seconds("U"),
        **vars(size),
    )


# -- times ------------------------------------------------------------------------------------------------------------


def _timed(task: Task, threads: int, side_by_side: int, seconds: float) -> tuple[Times, EntryTime, Contention]:
    count = min(side_by_side, cores()) if task.device.type == "cpu" else 1
    runners = [Runner(task, side_by_side, index) for index in range(count)]
    phases = _Phases(runners, threads, seconds)
    phases.run()
    contention = _contention(phases.alone, phases.beside, runners[0].groups) if count > 1 else ALONE
    if task.device.type == "cpu" and side_by_side * phases.processors > cores():
        contention = replace(contention, at_once=cores() / phases.processors)
    return phases.alone, _entry(phases.alone, runners[0].groups), contention


class _Phases:
    """Every runner in a thread of its own, as a pipeline has: one after another, then all together."""

    def __init__(self, runners: Sequence[Runner], threads: int, seconds: float) -> None:
        self._runners, self._threads = runners, threads
        self._seconds = seconds / (len(runners) if len(runners) == 1 else 2 * len(runners))
        self._autocast = AutocastState()  # of the caller, which a thread does not inherit
        self._turn = threading.Lock()
        self._together = threading.Barrier(len(runners))
        self._failures: list[BaseException] = []
        self._rounds = 0
        self.alone, self.beside = Times(), Times()
        self.processors = 1.0  # that one alone keeps busy

    def run(self) -> None:
        others = [threading.Thread(target=self._work, args=pair) for pair in enumerate(self._runners)]
        for thread in others:
            thread.start()
        try:
            for thread in others:
                thread.join()
        except BaseException as error:  # Ctrl-C: nobody begins another round
            self._failures.append(error)
            self._together.abort()
            raise
        finally:
            torch.set_num_threads(torch.get_num_threads())  # what they set, later threads would inherit
        if self._failures:
            raise self._failures[0]

    def _work(self, index: int, runner: Runner) -> None:
        try:
            with intra_op_threads(self._threads), self._autocast.replayed():
                with self._turn:
                    self._by_itself(index, runner)
                for kind in ("whole", "halves") if len(self._runners) > 1 else ():
                    self._together.wait()  # a pipeline runs all its backwards whole, or all in halves
                    # Then nobody waits: in a pipeline, too, one runs forward while the other runs backward.
                    chance = random.Random(index)
                    for _ in range(_MORE * self._rounds):
                        if self._failures:
                            return
                        begin = time.perf_counter()
                        runner.stages(kind)
                        # Or the same would always be beside the same.
                        time.sleep(_PAUSE * chance.random() * (time.perf_counter() - begin))
                beside = runner.taken()
                runner.updates()
                with self._turn:
                    self.beside.join(beside)
                    self.alone.join(runner.taken())
                runner.close()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self._failures.append(error)
            self._together.abort()

    def _by_itself(self, index: int, runner: Runner) -> None:
        """What counts are all rounds but two, after which it is warm."""
        if self._failures:
            return
        runner.round(index)
        begin = time.perf_counter()
        runner.round(index)
        taken = time.perf_counter() - begin
        if not self._rounds:
            self._rounds = max(_LEAST, min(_MOST, int(self._seconds / taken) if taken else _MOST))
        runner.taken()
        begin, used = time.perf_counter(), time.process_time()
        for done in range(self._rounds):
            if self._failures:
                return
            runner.round(index + done)
        self.processors = (time.process_time() - used) / (time.perf_counter() - begin)
        self.alone.join(runner.taken())


def _entry(times: Times, groups: Mapping[int, Sequence[int]]) -> EntryTime:
    """What layers one by one take longer than the same layers as one stage, for each time one more is begun."""
    more = sum(len(group) - 1 for group in groups.values())

    def of(letter: str) -> float:
        each = sum(times.of(number, letter).median for group in groups.values() for number in group)
        one = sum(times.of(number, letter).median for number in groups)
        return max(0.0, each - one) / more if more else 0.0

    return EntryTime(of("F"), of("B"))


def _contention(alone: Times, beside: Times, groups: Iterable[int]) -> Contention:
    """From stages of whole groups of layers, which were run both ways."""
    numbers = list(groups)

    def longer(letters: str) -> float:
        one, other = (
            sum(times.of(number, letter).median for number in numbers for letter in letters)
            for times in (alone, beside)
        )
        return max(1.0, other / one) if one else 1.0

    return Contention(longer("F"), longer("B"), longer("IW"))


# -- where it is measured -----------------------------------------------------------------------------------------


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hop(rounds: int = 200) -> Link:
    """What it takes to hand something from one thread of this process to another."""
    there, back = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(rounds):
            there.acquire()
            back.release()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        there.release()
        back.acquire()
        taken.append((time.perf_counter() - begin) / 2)
    thread.join()
    return Link("threads", None, statistics.median(taken))
