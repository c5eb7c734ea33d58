"""Casts of weights at fixed places: a weight is cast once per step, and captured actions read the cast from there.

While an action is captured, autocast's casts of parameters are answered with these places. The graph of a microbatch
still has a node for the cast, so gradients are summed and cast back as in the plain loop.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.stage.autocast import autocast_is_on, clear_cache
from gapless.stage.calls import Calls
from gapless.stage.cell_inputs import VERSION
from gapless.stage.random.draws import UncapturableError

_CAST = torch.ops.aten._to_copy.default


class CastPlaces(TorchDispatchMode):
    """Of the parameters of a stage."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = {_memory(each): each.detach() for each in parameters}
        self._places: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # parameters and their casts
        self._filled: Any = None  # with what
        self._stream = torch.cuda.Stream(priority=-1) if torch.cuda.is_available() else None  # that no lane has

    @contextlib.contextmanager
    def read(self, calls: Calls) -> Iterator[None]:
        """Around a capture, under autocast: casts that were made outside are not used in it, nor its own outside.
        Compiled layers cast in their own kernels, and torch would not run them in a mode.
        """
        if not autocast_is_on():
            yield
            return
        _forget_casts(calls)
        try:
            with contextlib.nullcontext() if calls.num_compiled else self:
                yield
        finally:
            _forget_casts(calls)

    def fill(self) -> None:
        """Casts all weights, if they may have changed."""
        if self._places:
            parameters, places = zip(*self._places.values(), strict=True)
            now = len(places), [*map(VERSION, parameters)]
            if now != self._filled:
                if self._stream is not None:  # torch fills new memory with NaN if algorithms must be deterministic
                    torch.cuda.current_stream().wait_stream(self._stream)
                torch._foreach_copy_(places, parameters)
                self._filled = now

    def places(self) -> list[Tensor]:
        """All of them."""
        return [place for _, place in self._places.values()]

    def end(self) -> None:
        """The step is over: weights may change, and not all optimizers count that."""
        self._filled = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is _CAST
            and kwargs.keys() == {"dtype"}
            and (known := self._parameters.get(_memory(args[0]))) is not None
        ):
            return self._place(known, kwargs["dtype"]).detach()
        if func._schema.is_mutable and self._places:
            taken = {place.data_ptr() for _, place in self._places.values()}
            written = (each for each in (args[0], kwargs.get("out")) if isinstance(each, Tensor))
            if any(each.untyped_storage().data_ptr() in taken for each in written):
                raise UncapturableError("a layer changes the cast of a weight in place")
        with torch._C.DisableTorchFunction():  # modes have seen the call that this is a part of
            return func(*args, **kwargs)

    def _place(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        key = id(parameter), dtype
        if key not in self._places:
            with ThreadPoolExecutor(1) as apart:  # where nothing is captured: a thread that captures takes no memory
                self._places[key] = parameter, apart.submit(self._made, parameter, dtype).result()
        return self._places[key][1]

    def _made(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):  # else this would be the graph's memory
            return torch.empty_like(parameter, dtype=dtype)


def _forget_casts(calls: Calls) -> None:
    calls.mode.forget()
    clear_cache()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
