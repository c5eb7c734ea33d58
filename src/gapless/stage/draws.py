"""Randomness that does not depend on who runs when.

Every layer draws as if `torch.manual_seed(seed_of(seed, step, microbatch, layer))` had been called just before it.
Threads share torch's default generators, so nothing may be drawn from them unprotected: dropout on a CPU draws its
exact mask from a private generator, and every other random call runs with the default generator's state swapped for the
private one, under a lock. The caller's own generators are left as they were.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .exclusive import exclusively
from .seeds import seed_of

if TYPE_CHECKING:
    from .intercept import Mode


class _OwnStates:
    """Where generators of a layer's own stood at its draws, so that it draws the same when it runs again."""

    def __init__(self) -> None:
        self._run = 0
        self._place: tuple[int, ...] = ()  # that of the last draw
        self._number = 0  # of the next draw there
        self._states: dict[tuple[int, ...], list[Tensor]] = {}

    def begin(self) -> None:
        """Some layers run, perhaps not for the first time."""
        self._run += 1

    def next(self, step: int, microbatch: int, layer: int, generator: torch.Generator) -> Tensor | None:
        """Where a generator stood at this draw, if the layer has made it before."""
        place = (step, microbatch, layer)
        if self._place[:1] != place[:1]:
            self._states.clear()
        if self._place != (*place, self._run):
            self._place, self._number = (*place, self._run), 0
        known = self._states.setdefault(place, [])
        self._number += 1
        if self._number <= len(known):
            return known[self._number - 1]
        known.append(generator.get_state())
        return None


class Draws:
    """The private generators of one stage; where it stands is set from outside, and costs nothing until something is
    drawn.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.microbatch = 0
        self.layer = 0
        self._generators: dict[torch.device, torch.Generator] = {}
        self._replaying = False
        self._own = _OwnStates()
        self._drawn: dict[torch.device, tuple[int, int, int]] = {}

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
        before = self._own.next(self.step, self.microbatch, self.layer, generator)
        now = generator.get_state() if self._replaying else None
        if before is not None:
            generator.set_state(before)
        try:
            yield
        finally:
            if now is not None:
                generator.set_state(now)

    def generator(self, device: torch.device) -> torch.Generator:
        """The generator of this layer on this device, seeded at its first draw."""
        place = (self.step, self.microbatch, self.layer)
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        if self._drawn.get(device) != place:
            generator.manual_seed(seed_of(self.seed, *place))
            self._drawn[device] = place
        return generator

    def restart(self) -> None:
        """Forgets what was drawn: the same place draws the same numbers again."""
        self._drawn.clear()
        self._own.begin()


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


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random calls on this device draw from."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextlib.contextmanager
def alone(devices: list[torch.device]) -> Iterator[None]:
    """While it holds, nobody else draws from torch's default generators; those of `devices` are put back afterwards."""
    with exclusively():
        before = [(default_generator(device), default_generator(device).get_state()) for device in devices]
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


@contextlib.contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """While it holds, these, which are torch's default ones, draw from `seed`, and nobody else draws from default
    generators; they are put back afterwards.
    """
    with exclusively():
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def dropout(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.dropout(x, p, training, inplace)`."""
    return _dropout(mode, func, args, kwargs, *args, **kwargs)


def _dropout(
    mode: Mode,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if (not training or p == 0.0) and 0.0 <= p <= 1.0:
        return input
    if mode.alone or inplace or not 0.0 < p < 1.0 or input.device.type != "cpu":
        return draw(mode, func, args, kwargs)
    mode.refuse_checkpoint()
    # The very operations of at::dropout on a CPU, with a generator of our own.
    noise = torch.empty_like(input).bernoulli_(1.0 - p, generator=mode.draws.generator(input.device)).div_(1.0 - p)
    return input * noise


def attention(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.scaled_dot_product_attention`, which draws only with dropout."""
    p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return draw(mode, func, args, kwargs) if p else mode.plain(func, args, kwargs)


def recurrent(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_VF.lstm` and its like, which draw only with dropout: their one float."""
    draws = any(type(arg) is float and arg > 0.0 for arg in args)
    return draw(mode, func, args, kwargs) if draws else mode.plain(func, args, kwargs)


def draw(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any random call."""
    own = kwargs.get("generator")
    if own is not None:
        with mode.draws.of_its_own(own):
            return mode.plain(func, args, kwargs)
    if mode.alone:
        return mode.plain(func, args, kwargs)
    mode.refuse_checkpoint()
    with swapped(mode.draws.generator(_device(args, kwargs))):
        return mode.plain(func, args, kwargs)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    if device is None:
        device = next((arg.device for arg in kwargs.values() if isinstance(arg, Tensor)), None)
    if device is None:
        device = torch.get_default_device()
    device = torch.device(device)
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )


def draws_by_tag(operator: Any) -> bool:
    """Whether one of `torch.ops`, a user's own too, says of itself that it draws."""
    overloads = (
        [getattr(operator, name) for name in operator.overloads()] if hasattr(operator, "overloads") else [operator]
    )
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def inside_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` runs the code that called us."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False


def _named(*places: Any, names: str) -> list[Callable[..., Any]]:
    return [getattr(place, name) for place in places for name in names.split() if hasattr(place, name)]


# Every function of torch that draws from a default generator, and is not above.
RANDOM: list[Callable[..., Any]] = [
    *_named(
        torch,
        names="rand rand_like randint randint_like randn randn_like randperm normal bernoulli multinomial poisson "
        "binomial "
        "dropout dropout_ alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
        "feature_alpha_dropout_ native_dropout rrelu rrelu_ _standard_gamma _sample_dirichlet _fused_dropout",
    ),
    *_named(
        Tensor,
        names="bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial normal_ random_ uniform_",
    ),
    *_named(torch._C._nn, names="rrelu_with_noise rrelu_with_noise_"),
    # Python functions that a mode is asked about as a whole: what they draw inside it is not asked about again.
    *_named(
        torch.nn.init,
        names="uniform_ normal_ trunc_normal_ xavier_uniform_ xavier_normal_ kaiming_uniform_ "
        "kaiming_normal_ orthogonal_ sparse_",
    ),
    *_named(
        F,
        names="alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout rrelu gumbel_softmax "
        "fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices",
    ),
]
RECURRENT: list[Callable[..., Any]] = _named(torch, names="lstm gru rnn_tanh rnn_relu")
