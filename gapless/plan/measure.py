"""What the layers of a model cost, measured: every layer is run as a stage of its own, as a pipeline would run it.

    pass 1    F F F F | I W  I W  I W  I W     forward through all layers, then back with the gradients' halves apart
    pass 2    F F F F | B    B    B    B       the same in one piece
    pass 3    F F F F | R B  R B  R B  R B     recomputed

The passes take turns, and what counts is the median. On the CPU as many threads measure side by side as devices will
run there, since cores share caches and memory. Copies of the layers are measured: the model stays as it is.
"""

import math
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.plan.profile import Layer, Link, Profile, Seconds
from gapless.plan.sizes import Sizes, fake_sizes, measured_sizes
from gapless.plan.task import Optimizer, Task, copied, moved, ones_like_outputs
from gapless.stage import microbatch as mb
from gapless.stage.batchnorm import BatchNorm
from gapless.stage.stage import Stage

Progress = Callable[[int, int], None]

_LEAST, _MOST = 5, 25  # rounds
_PASSES = ("halves", "whole", "again")
_ROOM = 0.4  # of a GPU's free memory that the copies of all layers may take together


def measure(
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
    name: str = "",
    progress: Progress | None = None,
) -> Profile:
    """The profile of these layers for this microbatch on this device.

    threads       intra-op threads of a CPU device; the caller's unless given
    side_by_side  how many such devices will share this machine's processors
    seconds       about how long to measure; at least five rounds
    optimizer     makes the optimizer whose state and step are measured; None for one without either
    sizes_alone   nothing is run: bytes come from tensors without data, and every time is 0
    progress      is called with the rounds done and the rounds in all
    """
    if not len(model):
        raise ConfigError("there are no layers to measure: give at least 1")
    device = torch.device(device)
    task = Task(list(model), moved(inputs, device), moved(target, device), loss, batchnorm)
    threads = threads or torch.get_num_threads()
    if sizes_alone:
        sizes, times = fake_sizes(task, device, optimizer), [Times() for _ in task.layers]
    else:
        with _threads(threads):
            sizes = measured_sizes(task, device, optimizer)
        times = _timed(task, device, optimizer, threads, side_by_side, seconds, progress)
    return Profile(
        name=name,
        layers=tuple(
            _layer(layer, number, size, time_)
            for number, (layer, size, time_) in enumerate(zip(model, sizes, times, strict=True))
        ),
        samples=mb.batch_size(inputs),
        input=sizes[0].input,
        reserved=_reserved(device) if not sizes_alone else 0,
        device=str(device) if device.type != "cpu" else f"cpu, {threads} thread{'s' if threads > 1 else ''}",
    )


def _layer(layer: Any, number: int, size: Sizes, times: "Times") -> Layer:
    return Layer(
        name=f"{number}.{type(layer).__name__}",
        forward=times.of("F"),
        input_grad=times.of("I"),
        weight_grad=times.of("W"),
        backward=times.of("B"),
        recompute=times.of("R"),
        update=times.of("U"),
        parameters=size.parameters,
        gradients=size.gradients,
        optimizer_state=size.optimizer_state,
        activation=size.activation,
        kept_for_weight_grad=min(size.kept_for_weight_grad, size.activation),
        boundary=size.boundary,
        overlap=size.overlap,
        workspace=size.workspace,
    )


# -- times ------------------------------------------------------------------------------------------------------------


class Times:
    """The seconds of one layer, by the letter of the action; `U` is the optimizer step."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)

    def of(self, letter: str) -> Seconds:
        values = self.taken.get(letter)
        if not values:
            return Seconds(0.0)
        median = statistics.median(values)
        return Seconds(median, statistics.median(abs(value - median) for value in values))


def _timed(
    task: Task,
    device: torch.device,
    optimizer: Optimizer | None,
    threads: int,
    side_by_side: int,
    seconds: float,
    progress: Progress | None,
) -> list[Times]:
    count = min(side_by_side, _cores()) if device.type == "cpu" else 1
    runners = [_Runner(task, device, optimizer, clock_for(device), side_by_side, index) for index in range(count)]
    together = threading.Barrier(count)
    failures: list[BaseException] = []
    rounds = [_LEAST]
    left = set(range(count))  # who still measures

    def work(index: int, runner: _Runner) -> None:
        try:
            with _threads(threads):
                runner.round(index, counts=False)
                together.wait()
                begin = time.perf_counter()
                runner.round(index, counts=False)
                if index == 0:
                    taken = time.perf_counter() - begin
                    rounds[0] = max(_LEAST, min(_MOST, int(seconds / taken) if taken else _MOST))
                together.wait()
                # From here on nobody waits: in a pipeline, too, one runs forward while the other runs backward.
                for done in range(rounds[0]):
                    if index == 0 and progress is not None:
                        progress(done, rounds[0])
                    runner.round(index + done)
                left.discard(index)
                while left and not failures:
                    runner.round(index, counts=False)
                together.wait()
                runner.updates()
                runner.close()
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            failures.append(error)
            together.abort()

    # A thread of its own for each, as a pipeline has: what it sets for itself ends with it.
    others = [threading.Thread(target=work, args=(index, runner)) for index, runner in enumerate(runners)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]
    merged = [Times() for _ in task.layers]
    for runner in runners:
        for mine, theirs in zip(merged, runner.times, strict=True):
            for letter, values in theirs.taken.items():
                mine.taken[letter] += values
    return merged


class _Runner:
    """Runs the passes on copies of its own. Where all layers do not fit on the device, one at a time is there."""

    def __init__(
        self, task: Task, device: torch.device, optimizer: Optimizer | None, clock: "Clock", parts: int, index: int
    ) -> None:
        self.task, self.device, self.clock, self.optimizer = task, device, clock, optimizer
        self.times = [Times() for _ in task.layers]
        numbers = range(len(task.layers))
        self.apart = not _fit_together(task.layers, device)
        # As many at a time as a device will have: more would push each other out of its caches.
        each = 1 if self.apart else math.ceil(len(numbers) / parts)
        self.groups = [list(numbers[first : first + each]) for first in range(0, len(numbers), each)]
        self.stages: dict[int, tuple[Stage, Stage, Any]] = {}
        self.given: dict[int, Any] = {0: task.inputs}  # the inputs of each group
        self.index = index

    def round(self, turn: int, *, counts: bool = True) -> None:
        """All passes over all layers, in an order that differs from turn to turn."""
        for place in self._order():
            group = self.groups[place]
            stages = [self._stages(number) for number in group]
            inputs = self.given[place]
            outputs = self._pass("whole", group, stages, inputs, counts=False)
            self.given[place + 1] = outputs
            for number in range(len(_PASSES)):
                self._pass(_PASSES[(turn + number) % len(_PASSES)], group, stages, inputs, counts)
            if self.apart:
                self._update(group, stages, counts)
                self.stages.clear()

    def _order(self) -> list[int]:
        """Each runner begins elsewhere, once it knows the inputs: in a pipeline no two devices run the same layers."""
        places = list(range(len(self.groups)))
        start = self.index % len(places) if len(self.given) > len(places) else 0
        return places[start:] + places[:start]

    def _stages(self, number: int) -> tuple[Stage, Stage, Any]:
        if number not in self.stages:
            layers = [copied(self.task.layers[number], self.device)]
            plain, again = self.task.stage(layers, number, split=True), self.task.stage(layers, number, remat="stage")
            parameters = [each for each in plain.parameters() if each.requires_grad]
            made = self.optimizer(parameters) if self.optimizer is not None and parameters else None
            self.stages[number] = plain, again, made
        return self.stages[number]

    def _pass(
        self, kind: str, group: list[int], stages: Sequence[tuple[Stage, Stage, Any]], value: Any, counts: bool
    ) -> Any:
        outs = []
        for number, (plain, again, _) in zip(group, stages, strict=True):
            stage = again if kind == "again" else plain
            more: dict[str, Any] = {"step": 0, "defer": kind == "halves"}
            if stage.loss is not None:
                more |= {"target": self.task.target}
            begin = self.clock.now()
            value = stage.forward(0, value, **more)
            self._note(number, "F", begin, counts and kind != "again")
            outs.append(value)
        grads: Any = None if stages[-1][0].loss is not None else ones_like_outputs(value)
        for number, (plain, again, _) in zip(reversed(group), reversed(stages), strict=True):
            outs.pop()
            if kind == "again":
                begin = self.clock.now()
                again.recompute(0)
                self._note(number, "R", begin, counts)
                grads = again.backward(0, grads)
            elif kind == "whole":
                begin = self.clock.now()
                grads = plain.backward(0, grads)
                self._note(number, "B", begin, counts)
            else:
                begin = self.clock.now()
                grads = plain.backward_input(0, grads)
                self._note(number, "I", begin, counts)
                begin = self.clock.now()
                plain.backward_weight(0)
                self._note(number, "W", begin, counts)
        for plain, again, _ in stages:
            plain.finish()
            again.finish()
        return value

    def updates(self) -> None:
        """Optimizer steps, at the end: they go through three times as much memory as the layers do."""
        numbers = sorted(self.stages)
        for done in range(_LEAST):
            self._update(numbers, [self.stages[number] for number in numbers], counts=done > 0)

    def _update(self, group: list[int], stages: Sequence[tuple[Stage, Stage, Any]], counts: bool) -> None:
        for number, (_, _, optimizer) in zip(group, stages, strict=True):
            if optimizer is not None:
                begin = self.clock.now()
                with torch.no_grad():
                    optimizer.step()
                self._note(number, "U", begin, counts)

    def _note(self, number: int, letter: str, begin: Any, counts: bool) -> None:
        seconds = self.clock.since(begin)
        if counts:
            self.times[number].taken[letter].append(seconds)

    def close(self) -> None:
        self.stages.clear()


class Clock:
    """Of a CPU: what has been called has been done."""

    def now(self) -> Any:
        return time.perf_counter()

    def since(self, begin: Any) -> float:
        return float(time.perf_counter() - begin)


class GpuClock(Clock):
    """From an idle GPU to an idle GPU, by its own events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        torch.cuda.synchronize(self._device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def since(self, begin: Any) -> float:
        end = torch.cuda.Event(enable_timing=True)
        end.record(torch.cuda.current_stream(self._device))
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def clock_for(device: torch.device) -> Clock:
    return GpuClock(device) if device.type == "cuda" else Clock()


# -- where it is measured -----------------------------------------------------------------------------------------


def _fit_together(layers: Sequence[Any], device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    size = sum(
        p.numel() * p.element_size() for layer in layers if isinstance(layer, nn.Module) for p in layer.parameters()
    )
    free, _ = torch.cuda.mem_get_info(device)
    return 4 * size < _ROOM * free


def _reserved(device: torch.device) -> int:
    """What the libraries take on a stream at the first product there; on a GPU every pipeline device has a stream."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        one = torch.ones(256, 256, device=device)
        before = torch.cuda.memory_allocated(device)
        product = torch.nn.functional.linear(one, one, one[0]) @ one
        torch.cuda.synchronize(device)
        after = torch.cuda.memory_allocated(device)
        return max(0, after - before - 2 * product.numel() * product.element_size())


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(count: int) -> AbstractContextManager[object]:
    """Intra-op threads of the calling thread."""
    before = torch.get_num_threads()
    if before == count:
        return nullcontext()
    stack = ExitStack()
    torch.set_num_threads(count)
    stack.callback(torch.set_num_threads, before)
    return stack


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
