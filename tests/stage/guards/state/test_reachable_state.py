"""Whatever a layer or the loss can reach is put back for a run that must not count, or refused: against a loop that
shares nothing.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gapless.errors import ConfigError
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

Tick = Callable[[], float]
number = 0  # global variables that one layer alone uses
numbers = [0]
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> float:
        self.n += 1
        return self.n


class SlotsAndMore(Slots):  # with a dict as well
    def __call__(self) -> float:
        self.more = getattr(self, "more", 0) + 1
        return super().__call__() + self.more


class Class:
    n = 0
    seen: list[int] = []  # noqa: RUF012

    def tick(self) -> float:
        type(self).n += 1
        self.seen.append(1)
        return self.n + len(self.seen)


class Named(dict[str, int]):
    n = 0


def bump(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def step(held: Any, name: str = "n") -> float:
    setattr(held, name, getattr(held, name, 0) + 1)
    return float(getattr(held, name))


def of_globals() -> float:
    global number
    number += 1
    numbers[0] += 1
    return number + numbers[0]


def defaulting(*, held: list[int]) -> Tick:
    def tick(*, held: list[int] = held) -> float:
        return bump(held)

    return tick


def in_weak_dict() -> Tick:
    key = linear()
    held = weakref.WeakKeyDictionary({key: 0})

    def tick() -> float:
        held[key] += 1
        return float(held[key])

    return tick


def in_order() -> Tick:
    held = collections.OrderedDict.fromkeys(range(5))

    def tick() -> float:
        first = next(iter(held))
        held.move_to_end(first)
        return float(first)

    return tick


def in_text() -> Tick:
    text = io.StringIO()
    return lambda: text.write("x") * len(text.getvalue())


def in_file() -> Tick:
    file = open(__file__)  # noqa: SIM115
    return lambda: len(file.readline())


def in_variable() -> float:
    VARIABLE.set(VARIABLE.get() + 1)
    return float(VARIABLE.get())


def in_queue() -> Tick:
    held: queue.Queue[int] = queue.Queue()
    held.put(0)

    def tick() -> float:
        held.put(held.get() + 1)
        return float(held.queue[0])

    return tick


def generator() -> Iterator[float]:
    yield from itertools.count(1)


def in_class() -> Tick:
    Class.n, Class.seen = 0, []
    return Class().tick


def in_globals() -> Tick:
    global number
    number, numbers[0] = 0, 0
    return of_globals


def in_context() -> Tick:
    VARIABLE.set(0)
    return in_variable


def in_proxy() -> Tick:
    held = {0: 0}
    shown = types.MappingProxyType(held)
    return functools.partial(lambda change, shown: change() * shown[0], functools.partial(bump, held), shown)


PUT_BACK: dict[str, Callable[[], Tick]] = {
    "slots": Slots,
    "slots and a dict": SlotsAndMore,
    "attributes of a dict": lambda: functools.partial(step, Named()),
    "partial": lambda: functools.partial(bump, [0]),
    "keyword default": lambda: defaulting(held=[0]),
    "array": lambda: functools.partial(bump, array.array("d", [0])),
    "memoryview": lambda: functools.partial(bump, memoryview(bytearray(1))),
    "ctypes": lambda: functools.partial(step, ctypes.c_double(), "value"),
    "array of NumPy": lambda: functools.partial(bump, np.zeros(1)),
    "array of objects": lambda: functools.partial(lambda held: bump(held[0]), np.array([[0], None], dtype=object)[:1]),
    "random numbers of NumPy": lambda: np.random.default_rng(3).random,
    "random numbers of Python": lambda: random.Random(3).random,
    "weak dict": in_weak_dict,
    "order of a dict": in_order,
    "text in memory": in_text,
    "file": in_file,
    "variable of a context": in_context,
    "local of a thread": lambda: functools.partial(step, threading.local()),
    "module": lambda: functools.partial(step, module_with(n=0)),
    "default factory": lambda: functools.partial(
        lambda held: held[len(held)], collections.defaultdict(functools.partial(bump, [0]))
    ),
    "mapping proxy": in_proxy,
    "globals": in_globals,
    "class": in_class,
}
REFUSED: dict[str, Callable[[], Tick]] = {
    "count": lambda: functools.partial(next, itertools.count(1)),
    "cycle": lambda: functools.partial(next, itertools.cycle([1, 2, 3])),
    "iterator of a list": lambda: functools.partial(next, iter([*range(1, 999)])),
    "enumerate": lambda: functools.partial(lambda held: next(held)[0], enumerate(iter([*range(999)]))),
    "generator": lambda: generator().__next__,
    "queue": in_queue,
}
WAYS: dict[str, dict[str, Any]] = {
    "stage": {"remat": "stage"},
    "layer": {"remat": "layer"},
    "restart": {},
    "later restart": {},
}


def module_with(**held: int) -> types.ModuleType:
    made = types.ModuleType("of_a_test")
    vars(made).update(held)
    return made


class Ticks(nn.Module):
    """Begins in step 2, or in step 3, which is not looked at, to draw in a checkpoint: it is run again then."""

    def __init__(self, tick: Tick, clock: Clock, way: str) -> None:
        super().__init__()
        self.linear, self.tick, self.clock = linear(), tick, clock
        self.begins = {"restart": 2, "later restart": 3}.get(way, sys.maxsize)

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x * (1 + 0.01 * self.tick()))
        if self.clock.step < self.begins:
            return x
        return checkpoint(lambda value: F.dropout(torch.tanh(value), 0.3), x, use_reentrant=False)


def assert_exact(make: Callable[[], Tick], way: str) -> None:
    assert_same_as_loop(
        lambda clock: ([linear(), Ticks(make(), clock, way), linear(), linear()], F.mse_loss), **WAYS[way]
    )


@pytest.mark.parametrize(("kind", "way"), zip(PUT_BACK, itertools.cycle(WAYS), strict=False))
def test_what_a_layer_reaches_moves_once(kind: str, way: str) -> None:
    assert_exact(PUT_BACK[kind], way)


@pytest.mark.parametrize(("kind", "way"), zip(REFUSED, itertools.cycle(WAYS), strict=False))
def test_what_cannot_be_put_back_is_refused(kind: str, way: str) -> None:
    with pytest.raises(ConfigError, match=r"Ticks\.tick.*(can't be put back|a second time).* in a list or a number"):
        assert_exact(REFUSED[kind], way)


@pytest.mark.parametrize("kind", REFUSED)
def test_where_nothing_runs_again_it_may_move(kind: str) -> None:
    assert_same_as_loop(lambda clock: ([linear(), Ticks(REFUSED[kind](), clock, ""), linear()], F.mse_loss))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [False, True])
def test_a_cache_may_fill_unless_its_function_has_changed_something(counts: bool, way: str) -> None:
    def make() -> Tick:
        held, calls = [0], [0]

        @functools.lru_cache
        def cached(key: int) -> float:
            return bump(held) if counts else 0.5 * key

        return lambda: cached(int(bump(calls)))

    if counts and "restart" in way:
        with pytest.raises(ConfigError, match=r"Ticks\.tick.*can't be put back"):
            assert_exact(make, way)
    else:
        assert_exact(make, way)


class Normed(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        value = F.mse_loss(out, y)
        self.mean.mul_(0.9).add_(value.detach(), alpha=0.1)
        return value / self.mean.clone()


class Task:
    def __init__(self, criterion: Normed) -> None:
        self.criterion = criterion

    def loss(self, out: Tensor, y: Tensor) -> Any:
        return self.criterion(out, y)


@pytest.mark.parametrize(("where", "remat"), [("lambda", "stage"), ("method", "layer"), ("partial", "stage")])
def test_a_loss_around_a_module_with_a_buffer(where: str, remat: str) -> None:
    """The buffer moved twice where remat runs the loss twice."""

    def make(clock: Clock) -> Made:
        criterion = Normed()
        losses: dict[str, Any] = {
            "lambda": lambda out, y: criterion(out, y),
            "method": Task(criterion).loss,
            "partial": functools.partial(criterion),
        }
        return [linear(), nn.Tanh(), linear(), linear()], losses[where]

    assert_same_as_loop(make, remat=remat)


@pytest.mark.in_pairs
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("where", ["list", "closure", "object", "method", "hook"])
def test_a_batch_norm_that_nobody_registered_counts_once(where: str, momentum: float | None, way: str) -> None:
    class Holds(Ticks):
        def __init__(self, clock: Clock) -> None:
            super().__init__(lambda: 1.0, clock, way)
            norm = nn.BatchNorm1d(6, affine=False, momentum=momentum)
            self.held: Any = {"list": [norm], "object": types.SimpleNamespace(norm=norm), "method": norm.forward}.get(
                where
            )
            self.norm = {"closure": lambda x: norm(x), "method": norm.forward}.get(where)
            if where == "hook":
                self.linear.register_forward_hook(lambda module, given, x: norm(x))
            self.look = lambda: [norm.running_mean.tolist(), int(norm.num_batches_tracked)]  # type: ignore

        def forward(self, x: Tensor) -> Any:
            if where == "list":
                x = self.held[0](x)
            elif where == "object":
                x = self.held.norm(x)
            elif self.norm is not None:
                x = self.norm(x)
            if where == "list":  # which reads what it has just moved
                x = x * (1 + self.held[0].running_mean)
            return super().forward(x)

    assert_same_as_loop(
        lambda clock: ([linear(), Holds(clock), linear(), linear()], F.mse_loss),
        state=lambda layers: layers[1].look(),
        **WAYS[way],
    )


class Counted(nn.Module):
    """A number that all layers of the class have, and a table that only grows."""

    count = 0
    table: dict[int, float] = {}  # noqa: RUF012

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.linear, self.counts = linear(), counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            Counted.count += 1
        elif len(x) not in self.table:
            self.table[len(x)] = 1 / len(x)
        return self.linear(x) * (1 + self.table.get(len(x), 0) + 0.01 * self.count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_what_remat_cannot_put_back_since_another_stage_uses_it_is_refused(remat: str) -> None:
    def make(clock: Clock, *, counts: bool) -> Made:
        Counted.count = 0
        Counted.table.clear()
        return [Counted(counts=counts), linear(), Counted(counts=counts), linear()], F.mse_loss

    with pytest.raises(ConfigError, match=r"Counted\.count was changed .* layer 0 \(Counted\) and layer 2 \(Counted\)"):
        assert_same_as_loop(functools.partial(make, counts=True), remat=remat)
    assert_same_as_loop(functools.partial(make, counts=False), remat=remat)


LOG = logging.getLogger(__name__)
LOCK = threading.Lock()
activations: dict[str, Tensor] = {}


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_what_is_no_state_of_a_layer_is_left_alone(remat: str) -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.log, self.file, self.lock = linear(), LOG, io.TextIOWrapper(io.BytesIO()), LOCK
            self.names = (each for each in "")  # which has ended
            list(self.names)
            self.linear.register_forward_hook(
                lambda module, given, x: activations.update({str(id(module)): x.detach()})
            )

        def forward(self, x: Tensor) -> Tensor:
            self.log.debug("a microbatch of %d", len(x))
            with self.lock:
                self.file.write("x")
            return torch.tanh(self.linear(x))

    assert_same_as_loop(lambda clock: ([Logs(), Logs(), Logs()], F.mse_loss), remat=remat)
