"""Layers run as a pipeline would run them, and timed: each as a stage of its own, and some as one stage together.

whole    F F F F | B   B   B   B             forward through all layers, then back
halves   F F F F | I   I   I   I | W W W W   the same with the gradients' halves apart
again    F F F F | R B R B R B R B           recomputed

As one stage, four layers have one F and one B, or one F, I and W.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gapless.plan.profile.profile import Seconds
from gapless.plan.profile.task import Task, copied, ones_like_outputs
from gapless.stage.stage import Stage

PASSES = (("whole", False), ("halves", False), ("again", False), ("whole", True), ("halves", True))
"""Each with whether all layers are one stage."""

_WAYS: dict[str, dict[str, Any]] = {"whole": {}, "halves": {"split": True}, "again": {"remat": "stage"}}
_LETTERS = {"whole": ("F", "B"), "halves": ("f", "I"), "again": ("", "")}  # of what is timed; nobody asks for ""
_ROOM = 0.4  # of a GPU's free memory that the copies of all layers may take together
_UPDATES = 5


class Times:
    """The seconds of each layer, by the letter of the action. `f` is a forward that records what a `W` will need; `U`
    is the optimizer step; a group of layers in one stage has a negative number: -1 for the first group.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[int, str], list[float]] = defaultdict(list)

    def add(self, layer: int, letter: str, seconds: float) -> None:
        self._taken[layer, letter].append(seconds)

    def join(self, other: "Times") -> None:
        """What another has measured counts as well."""
        for key, values in other._taken.items():
            self._taken[key] += values

    def of(self, layer: int, letter: str) -> Seconds:
        values = self._taken.get((layer, letter))
        if not values:
            return Seconds(0.0)
        median = statistics.median(values)
        return Seconds(median, statistics.median(abs(value - median) for value in values))


class _Clock:
    """Of a CPU: what has been called has been done. Of a GPU: from idle to idle, by its own events."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def now(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        torch.cuda.synchronize(self._gpu)
        return self._event()

    def since(self, begin: Any) -> float:
        if self._gpu is None:
            return float(time.perf_counter() - begin)
        end = self._event()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event


class Runner:
    """Runs the passes on copies of its own. Where all layers do not fit on the device, one at a time is there."""

    def __init__(self, task: Task, num_devices: int, index: int = 0) -> None:
        """`num_devices`: how many the model will be on; `index`: which of them this one stands for."""
        self._task, self._index = task, index
        self._clock = _Clock(task.device)
        self._apart = not _fit_together(task.layers, task.device)
        # As many at a time as a device will have: more would push each other out of its caches.
        numbers = range(len(task.layers))
        each = 1 if self._apart else math.ceil(len(numbers) / num_devices)
        firsts = enumerate(range(0, len(numbers), each), start=1)
        self.groups = {-place: list(numbers[first : first + each]) for place, first in firsts}  # each as one stage, too
        self._stages: dict[int, dict[str, Stage]] = {}  # of each layer and group, in each way
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._given: dict[int, Any] = {0: task.inputs}  # the inputs of each group
        self._times = Times()
        self._alone = num_devices == 1
        self._step = 0

    def round(self, turn: int) -> None:
        """All passes over all layers, in an order that differs from turn to turn."""
        for place in self._order():
            for number in range(len(PASSES)):
                self._pass(*PASSES[(turn + number) % len(PASSES)], place)
            if self._apart:
                self._update()
                self.close()

    def stages(self, kind: str) -> None:
        """All layers as the stages that they may be, with backwards that are whole or in halves."""
        for place in self._order():
            self._pass(kind, True, place)

    def _order(self) -> list[int]:
        """Each runner begins elsewhere, once it knows the inputs: in a pipeline no two devices run the same layers."""
        places = list(range(len(self.groups)))
        start = self._index % len(places) if len(self._given) > len(places) else 0
        return places[start:] + places[:start]

    def _made(self, number: int) -> dict[str, Stage]:
        """A layer, or a group of them, as a stage: with the backward in one piece, in halves, and recomputed."""
        if number not in self._stages:
            if number < 0:
                group, ways = self.groups[number], ["whole", "halves"]
                layers = [layer for each in group for layer in self._made(each)["whole"].layers]
            else:
                group, ways = [number], list(_WAYS)
                layers = [copied(self._task.layers[number], self._task.device)]
            stages = {way: self._task.stage(layers, group[0], **_WAYS[way]) for way in ways}
            for stage in stages.values():
                stage.compute_alone(self._alone)
            parameters = [each for each in stages["whole"].parameters() if each.requires_grad]
            if number >= 0 and self._task.optimizer is not None and parameters:
                self._optimizers[number] = self._task.optimizer(parameters)
            self._stages[number] = stages
        return self._stages[number]

    def _pass(self, kind: str, as_one: bool, place: int) -> None:
        numbers, value = [-1 - place] if as_one else self.groups[-1 - place], self._given[place]
        stages = [self._made(number)[kind] for number in numbers]
        self._step += 1  # a stage takes a closer look at its first one, and at few of those that follow
        forward, backward = _LETTERS[kind]
        for number, stage in zip(numbers, stages, strict=True):
            more: dict[str, Any] = {"step": self._step, "defer": kind == "halves"}
            if stage.loss is not None:
                more |= {"target": self._task.target}
            begin = self._clock.now()
            value = stage.forward(0, value, **more)
            self._note(number, forward, begin)
        self._given.setdefault(place + 1, value)
        grads: Any = None if stages[-1].loss is not None else ones_like_outputs(value)
        for number, stage in zip(reversed(numbers), reversed(stages), strict=True):
            begin = self._clock.now()
            if kind == "again":
                stage.recompute(0)
                self._note(number, "R", begin)
                begin = self._clock.now()
            grads = stage.backward_input(0, grads) if kind == "halves" else stage.backward(0, grads)
            self._note(number, backward, begin)
        for number, stage in zip(reversed(numbers), reversed(stages), strict=True):
            if kind == "halves":
                begin = self._clock.now()
                stage.backward_weight(0)
                self._note(number, "W", begin)
            stage.finish()

    def updates(self) -> None:
        """Optimizer steps, at the end: they go through three times as much memory as the layers do."""
        for _ in range(_UPDATES):
            self._update()

    def _update(self) -> None:
        for number, optimizer in sorted(self._optimizers.items()):
            begin = self._clock.now()
            with torch.no_grad():
                optimizer.step()
            self._note(number, "U", begin)

    def _note(self, number: int, letter: str, begin: Any) -> None:
        self._times.add(number, letter, self._clock.since(begin))

    def taken(self) -> Times:
        """What was measured since the last call of this."""
        times, self._times = self._times, Times()
        return times

    def close(self) -> None:
        self._stages.clear()
        self._optimizers.clear()


def _fit_together(layers: Sequence[Any], device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    size = sum(each.nbytes for layer in layers if isinstance(layer, nn.Module) for each in layer.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return 4 * size < _ROOM * free
