"""The calls of a stage: its layers and its loss, each in its way."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload

from gapless.errors import ConfigError
from gapless.guards.process_wide import COMPILED_DRAWS, GRAD_MODE
from gapless.stage.batch.loss_counts import check_scalar
from gapless.stage.batch.loss_divisors import Divisors
from gapless.stage.batch.plain import apply_first
from gapless.stage.guards.process_state import AtWork, here, watch_torch
from gapless.stage.guards.stored_tensors import Stored
from gapless.stage.norm.running_statistics import BatchNorm, Statistics
from gapless.stage.random.drawless_layers import Unwatched
from gapless.stage.random.draws import Draws, alone, default_generators
from gapless.stage.random.hidden_draws import watched
from gapless.stage.split.call_mode import Mode, Restart
from gapless.stage.split.call_table import TABLE
from gapless.stage.split.deferred import Records
from gapless.stage.split.interception import BareLayers, Way, has_hooks, is_open, way_of
from gapless.stage.split.linear import linear

from .auxiliary import Added, adding
from .backwards import Backwards
from .compiled import CompiledCalls, is_compiled, is_traced
from .saved_activations import Work

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_CPU = torch.device("cpu")
_LOSS = -1  # as the number of a layer
_push: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
_OUTSIDE, _DIRECTLY, _INSIDE, _COMPILED = Way.OUTSIDE, Way.DIRECTLY, Way.INSIDE, Way.COMPILED


class Calls:
    """The calls of one stage."""

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        first_layer: int,
        *,
        seed: int,
        split: bool,
        loss: Callable[[Any, Any], Tensor] | None,
        spread: bool,
        batchnorm: BatchNorm = "microbatch",
        first_microbatch: int = 0,
        stored: Stored | None = None,
    ) -> None:
        self.stored = Stored() if stored is None else stored
        self._layers: list[tuple[Any, Way]] = [(layer, way_of(layer, split)) for layer in layers]
        self._loss = loss
        self.divisors: Divisors | None = None  # of a loss of which it is not known what it counts
        self._loss_way = Way.OUTSIDE if loss is None else way_of(loss, split)
        self._spread = spread
        self._split = split
        self.first_layer, self.first_microbatch = first_layer, first_microbatch
        self.draws = Draws(seed, self.stored.generators)
        self.statistics = Statistics(batchnorm, [*layers, loss])
        self.mode = Mode(self.draws, self.statistics, TABLE)
        modules = self.mode.modules = [part for part in (*layers, loss) if isinstance(part, nn.Module)]
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._compiled = {index: CompiledCalls(layer) for index, layer in enumerate(layers) if is_compiled(layer)}
        self.num_compiled = len(self._compiled)
        self.waited: set[int] = set()  # parameters of compiled regions, by id, whose gradients have waited for a W
        if is_compiled(loss):
            self._compiled[_LOSS] = CompiledCalls(loss)
        self._watched: set[tuple[int, bool]] = set()  # layers of which it is known what they draw
        self._hides = False  # one was seen in this forward to draw unseen
        ways = [way for _, way in (*self._layers, (loss, self._loss_way))]
        self.is_open = any(map(is_open, (*layers, loss)))
        self.ran_unseen = False  # a call of this forward
        watch_torch()
        self._forwards_here, self._aside = AtWork(self.mode, "forward"), AtWork(None)
        seen = {"is_open": self.is_open, "are_compiled": bool(self._compiled)}
        self.backwards = Backwards(self.mode, (*layers, loss), split=split, **seen)
        self._around: tuple[Any, Any] = (None, None)  # what this thread was at when a forward began
        self._held: AbstractContextManager[Any] | None = None  # torch's default generators, by this forward
        unknown = any(way in (Way.INSIDE, Way.IN_TRAINING) for way in ways)
        self.unwatched = self._unwatched = Unwatched(unknown=unknown, is_open=self.is_open)
        self.bare = BareLayers(self._layers, (loss, self._loss_way))
        # What runs outside the mode uses its parameters unseen.
        for layer, way in (*self._layers, (loss, self._loss_way)):
            if way in (Way.OUTSIDE, Way.COMPILED) and isinstance(layer, nn.Module) and not is_traced(layer):
                self.mode.exclude(layer.parameters())
        for layer in layers:
            if is_traced(layer):
                layer.bind(self.place, self.answer, split=split, exclude=self.mode.exclude)  # type: ignore[attr-defined]

    def place(self, number: int) -> None:
        """The next draw is the `number`-th random call of the model, which counts as its layer."""
        draws = self.draws
        draws.layer = number
        if self.mode.alone:
            torch.manual_seed(draws.seed_here())

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answers one call of a traced graph."""
        handler = TABLE.get(function)
        if handler is not None:
            return handler(self.mode, function, args, kwargs)
        if isinstance(function, OpOverload):
            return self.mode.draw(function, args, kwargs)
        with self.mode:
            return function(*args, **kwargs)

    def parts_of(self, layers: range, *, with_loss: bool) -> list[Any]:
        """Some of the layers, and the loss."""
        return [*(self._layers[index][0] for index in layers), *([self._loss] if with_loss else [])]

    def parameters_of(self, layers: range, *, with_loss: bool) -> list[nn.Parameter]:
        """Those of some of the layers, each once."""
        modules = (part for part in self.parts_of(layers, with_loss=with_loss) if isinstance(part, nn.Module))
        return list(dict.fromkeys(parameter for part in modules for parameter in part.parameters()))

    @property
    def drew_anew(self) -> bool:
        """Whether a layer was the one that drew, where the forward has started again for that."""
        return self._unwatched.has_settled

    @property
    def compile_seconds(self) -> float:
        """What the calls lasted in which layers were compiled."""
        return self.backwards.cold_seconds + sum(each.seconds for each in self._compiled.values())

    def enter(self, microbatch: int, *, replaying: bool) -> None:
        """A forward comes, or comes again for remat. It may take several runs."""
        if self.statistics.idle:
            self.statistics.coming = microbatch, replaying
        else:
            self.statistics.enter(microbatch, replaying=replaying)
        if self._unwatched.doubt is not None or self._unwatched.has_settled:
            self._unwatched.enter()

    def begin(self, records: Records | None, step: int, microbatch: int, *, again: bool = False) -> Added:
        """A run of a forward starts; `end` comes after it. Weight gradients go to `records`, if the stage splits its
        backward and this forward has one. `again`: there may be a second one that must draw the same. Returns where
        auxiliary losses are collected.
        """
        draws, mode = self.draws, self.mode
        if step != draws.step:
            self.forget()
        draws.step, draws.microbatch = step, self.first_microbatch + microbatch
        draws.run += 1
        self.ran_unseen, self._grads = False, torch.is_grad_enabled()
        device = self._parameters[0].device if self._parameters else _CPU
        mode.begin(records if self._split else None, device.type)
        seen = again or mode.defers_now or bool(mode.cast_anew) or not mode.one_thread
        self._unwatched.begin(device, apart=not (mode.alone or draws.are_captured), allowed=not seen)
        if mode.alone:
            self._held = alone(default_generators([device]))
            self._held.__enter__()
        added = Added()
        self._around = here.work, adding.add
        here.work, adding.add = self._forwards_here, added.add
        return added

    def end(self) -> None:
        """The run is over, in whichever way."""
        here.work, adding.add = self._around
        if self._held is not None:
            self._held.__exit__(None, None, None)
            self._held = None

    def layer(self, index: int, value: Any) -> Any:
        """Calls layer `index` of the stage."""
        layer, way = self._layers[index]
        mode, draws = self.mode, self.draws
        draws.layer = self.first_layer + index
        if mode.alone:
            torch.manual_seed(draws.seed_here())
        call = layer
        if self._spread and index == 0 and isinstance(value, tuple | dict):
            call = functools.partial(apply_first, layer)
        elif way is _INSIDE or mode.cast_anew:
            pass  # every call must be seen
        elif way is _DIRECTLY and type(value) is Tensor and not has_hooks(layer):
            if mode.defers_now:
                return linear(mode, F.linear, (value, layer.weight, layer.bias), {})
            return layer(value)
        elif way is _OUTSIDE and not has_hooks(layer):
            return layer(value)
        return self._called(index, layer, way, call, value)

    def _called(self, index: int, layer: Any, way: Way, call: Callable[..., Any], *args: Any) -> Any:
        """A call of which something must be seen, or nothing can."""
        mode, unwatched = self.mode, self._unwatched
        if way is _COMPILED:
            self.ran_unseen = True
            with self._aside:
                result, cold = self._compiled[index](call, args, self.draws, self._device())
            self.backwards.cold |= cold
            return result
        key = (index, getattr(layer, "training", True))
        if unwatched.allowed and unwatched.runs(key):
            self.ran_unseen = True
            return call(*args)
        drawn, normed, behind = self.draws.count, self.statistics.asked, mode.behind
        if way is _INSIDE and (mode.alone or key in self._watched):
            _push(mode)  # as `with mode` does
            try:
                result = call(*args)
            finally:
                _pop()
        else:
            with (
                mode if self._inside(layer, way) else _NOTHING,
                self._watch(key) if way is _INSIDE else _NOTHING,
            ):
                result = call(*args)
        if self.draws.count != drawn:
            unwatched.drew(key)
        elif (
            key not in unwatched.known
            and isinstance(layer, nn.Module)
            and (self.statistics.asked, mode.behind) == (normed, behind)
        ):
            unwatched.learn(key, layer)
        return result

    def watch_always(self) -> None:
        """Where torch's default generators stand tells nothing of these calls."""
        self._unwatched.stop()

    def look_back(self) -> None:
        """A forward is over: gradients are on or off as before, and nothing was drawn unseen, but in first calls."""
        if torch.is_grad_enabled() is not self._grads:
            torch.set_grad_enabled(self._grads)
            raise GRAD_MODE.refusal("a layer leaves gradients switched on or off for those after it")
        if self._unwatched.moved():
            self._watched.clear()
            raise Restart("a layer draws random numbers in a new way", misdrawn=True)
        if self._hides:
            self.mode.alone, self._hides = True, False

    @contextlib.contextmanager
    def _watch(self, key: tuple[int, bool]) -> Iterator[None]:
        """Around a call of which nothing is known: the first one tells whether it draws unseen."""
        with watched(self.draws, self._device()) as touched:
            self.mode.first_call = touched
            try:
                yield
            finally:
                self.mode.first_call = None
        self._watched.add(key)
        self.backwards.alone_now |= touched.checkpoints
        if touched.seen:
            self._unwatched.hides()
            self._hides = True

    def loss(self, outputs: Any, work: Work) -> Any:
        """Calls the loss."""
        assert self._loss is not None
        target = work.target
        seen = self._loss_way is not _OUTSIDE or self.mode.cast_anew or has_hooks(self._loss)
        try:
            if seen:
                result = self._called(_LOSS, self._loss, self._loss_way, self._loss, outputs, target)
            else:
                result = self._loss(outputs, target)
        except (AttributeError, TypeError) as error:
            if target is None:
                raise ConfigError(
                    f"no target was given, and the loss failed without one ({type(error).__name__}: {error}): pass it "
                    "after the inputs, as step(inputs, target)"
                ) from error
            raise
        if self._loss_way is _COMPILED and self._compiled[_LOSS].draws:
            raise COMPILED_DRAWS.refusal("a compiled loss draws random numbers, which can't be seeded")
        if type(result) is not Tensor or result.dim():
            check_scalar(result)
        if self.divisors is not None:
            self.divisors.note(work.step, work.weight, outputs, result)
        return result

    def forget(self) -> None:
        """Lets go of what lasts for one step."""
        self.mode.forget()
        self._unwatched.rest()
        self.backwards.cold = self.backwards.alone_now = False

    def _inside(self, layer: Any, way: Way) -> bool:
        if self.mode.cast_anew:
            return True
        if way is Way.OUTSIDE:
            return has_hooks(layer)
        return way is not Way.IN_TRAINING or any(module.training for module in layer.modules()) or has_hooks(layer)

    def _device(self) -> torch.device:
        return self._parameters[0].device if self._parameters else _CPU
