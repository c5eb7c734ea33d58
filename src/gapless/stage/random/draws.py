"""Randomness that does not depend on who runs when.

Every layer draws as if `torch.manual_seed(seed_of(seed, step, microbatch, layer))` had been called just before it.
Threads share torch's default generators, so nothing may be drawn from them unprotected: dropout on a CPU draws its
exact mask from a private generator, and every other random call runs with the default generator's state swapped for the
private one, under a lock. The caller's own generators are left as they were.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as checkpoints
from torch import Tensor

from gapless.guards.process_wide import SHARED_GENERATORS

from .exclusive import exclusively
from .seeds import seed_of

# From torch 2.15 on `checkpoint` is also a decorator, and calls another function.
_CHECKPOINT = inspect.unwrap(getattr(checkpoints, "_checkpoint_impl", checkpoints.checkpoint)).__code__
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks


class UncapturableError(Exception):
    """What can't be part of a CUDA graph, and why."""


class _Latest(dict[torch.Generator, object]):
    """Who has drawn from the latest generators: before torch 2.13 they can't be held weakly, and some layers make a new
    one for each forward.
    """

    def __setitem__(self, generator: torch.Generator, user: object) -> None:
        while len(self) >= 256:
            del self[next(iter(self))]
        super().__setitem__(generator, user)

    def setdefault(self, generator: torch.Generator, user: object = None) -> object:
        if generator not in self:
            self[generator] = user
        return self[generator]


Users = MutableMapping[torch.Generator, object]  # by generator that layers bring, who has drawn from it


def no_users() -> Users:
    """Where nobody has drawn yet."""
    return WeakKeyDictionary() if torch.Generator.__weakrefoffset__ else _Latest()


class Draws:
    """The private generators of one stage; where it stands is set from outside, and costs nothing until something is
    drawn.
    """

    def __init__(self, seed: int, users: Users | None = None) -> None:
        """The stages of a model share `users`."""
        self.seed = seed
        self._users = no_users() if users is None else users
        self.step = 0
        self.microbatch = 0
        self.layer = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._replaying = False
        self._drawn: dict[torch.device, tuple[int, ...]] = {}
        # Where generators of a layer's own stood at its draws, so that it draws the same when it runs again.
        self._states: dict[tuple[int, ...], list[Tensor]] = {}
        self.run = 0  # of a forward; in each of its runs the same place draws the same numbers again
        self._place: tuple[int, ...] = ()  # that of the last such draw
        self._number = 0  # of the next one there
        self.count = 0  # of the draws so far
        self.on_gpu: set[int] = set()  # layers that were seen to draw there
        self._captured: Mapping[int, torch.Generator] | None = None  # of the layers, while a CUDA graph is captured
        self.are_captured = False
        self._first_run: dict[int, int] = {}  # in which of the runs of a capture each of them has drawn

    @contextlib.contextmanager
    def captured(self, generators: Mapping[int, torch.Generator]) -> Iterator[None]:
        """Around the capture of a CUDA graph: each layer draws from the one that is registered for it."""
        self._captured, self._first_run, self.are_captured = generators, {}, True
        try:
            yield
        finally:
            self._captured, self.are_captured = None, False

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """What was drawn is drawn once more."""
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False

    @contextlib.contextmanager
    def of_its_own(self, generator: torch.Generator) -> Iterator[None]:
        """Around a draw from a generator that the layer brings: it draws the same when the layer runs again, and for
        remat it then goes on from where it was.
        """
        self.count += 1
        if self._users.setdefault(generator, self) is not self:
            raise SHARED_GENERATORS.refusal(
                "layers of several stages draw from one torch.Generator, and which draws first depends on timing"
            )
        if self._captured is not None:
            raise UncapturableError("a layer draws from a generator of its own")
        before = self._next(generator)
        now = generator.get_state() if self._replaying else None
        if before is not None:
            generator.set_state(before)
        try:
            yield
        finally:
            if now is not None:
                generator.set_state(now)

    def _next(self, generator: torch.Generator) -> Tensor | None:
        """Where a generator stood at this draw, if the layer has made it before."""
        place = (self.step, self.microbatch, self.layer)
        if self._place[:1] != place[:1]:
            self._states.clear()
        if self._place != (*place, self.run):
            self._place, self._number = (*place, self.run), 0
        known = self._states.setdefault(place, [])
        self._number += 1
        if self._number <= len(known):
            return known[self._number - 1]
        known.append(generator.get_state())
        return None

    def seed_here(self) -> int:
        """The seed of the layer that is being called."""
        return seed_of(self.seed, self.step, self.microbatch, self.layer)

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator of this layer on this device, seeded at its first draw."""
        self.count += 1
        if self._captured is not None:
            if device.type != "cuda" or self.layer not in self._captured:
                raise UncapturableError(f"a layer draws on the {device.type}, or only now and then")
            if self._first_run.setdefault(self.layer, self.run) != self.run:
                raise UncapturableError("a layer started again, and would draw other numbers")
            return self._captured[self.layer]
        place = (self.step, self.microbatch, self.layer, self.run)
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        if self._drawn.get(device) != place:
            generator.manual_seed(self.seed_here())
            self._drawn[device] = place
            if device.type == "cuda":
                self.on_gpu.add(self.layer)
        return generator

    def swapped_in(self, device: torch.device) -> AbstractContextManager[None]:
        """While it holds, torch's default generator of that device goes on where this layer's stands."""
        generator = self.generator(device)
        return swapped(generator) if self._captured is None else _exchanged(generator)

    @contextlib.contextmanager
    def all_swapped_in(self, devices: Iterable[torch.device]) -> Iterator[list[torch.Generator]]:
        """The same for the CPU and for these, whether or not anything is drawn; yields torch's default generators."""
        defaults, count, known = default_generators(devices), self.count, self.layer in self.on_gpu
        with contextlib.ExitStack() as stack:
            for each in defaults:
                stack.enter_context(swapped(self.generator(each.device)))
            self.count = count
            before = [each.get_state() for each in defaults]
            yield defaults
            if not known and all(stands_at(*each) for each in zip(defaults[1:], before[1:], strict=True)):
                self.on_gpu.discard(self.layer)


@contextlib.contextmanager
def swapped(generator: torch.Generator) -> Iterator[None]:
    """While it holds, torch's default generator of that device goes on where `generator` stands."""
    default = default_generator(generator.device)
    with exclusively():
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


@contextlib.contextmanager
def _exchanged(generator: torch.Generator) -> Iterator[None]:
    """The same while a CUDA graph is captured: it notes whose numbers are drawn, and not which."""
    default = default_generator(generator.device)
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random calls on this device draw from."""
    if device.type == "cpu":
        return torch._C.default_generator  # the same as torch's, which layers are seen to ask for: see `process_state`
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Those that random calls on the CPU and on these devices draw from."""
    return [default_generator(device) for device in dict.fromkeys((torch.device("cpu"), *devices))]


@contextlib.contextmanager
def alone(generators: Sequence[torch.Generator] = ()) -> Iterator[list[Tensor]]:
    """While it holds, nobody else draws from torch's default generators. Those given are put back afterwards to where
    they stood, which is what it yields.
    """
    with exclusively():
        before = [generator.get_state() for generator in generators]
        try:
            yield before
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def stands_at(generator: torch.Generator, state: Tensor) -> bool:
    """Whether it has drawn nothing since. States have numbers, even where a mode makes tensors that have none."""
    if not torch._C._len_torch_dispatch_stack():
        return torch.equal(generator.get_state(), state)
    with torch._C._DisableTorchDispatch():
        return torch.equal(generator.get_state(), state)


@contextlib.contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """While it holds, these, which are torch's default ones, draw from `seed`, and nobody else draws."""
    with alone(generators):
        for generator in generators:
            generator.manual_seed(seed)
        yield


def own_generator(kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The one that a random call brings, unless it is one of torch's default ones."""
    own: torch.Generator | None = kwargs.get("generator")
    return None if own is None or own is default_generator(own.device) else own


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """Where a random call draws."""
    device = kwargs.get("device")
    if device is None:
        device = next((arg.device for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
    device = torch.get_default_device() if device is None else torch.device(device)
    has_number = device.type != "cuda" or device.index is not None
    return device if has_number else torch.device("cuda", torch.cuda.current_device())


def draws_by_tag(operator: Any) -> bool:
    """Whether one of `torch.ops`, a user's own too, says of itself that it draws."""
    overloads = (
        [getattr(operator, name) for name in operator.overloads()] if hasattr(operator, "overloads") else [operator]
    )
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def checkpoints_around() -> int:
    """How many calls of `torch.utils.checkpoint` run the code that called us, one inside the other. Around each there
    are hooks on what is saved, or no gradients, so that elsewhere the stack need not be walked.
    """
    if _top_hooks(False) is None and torch.is_grad_enabled():
        return 0
    frame, found = sys._getframe(1).f_back, 0
    while frame is not None:
        found += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return found
