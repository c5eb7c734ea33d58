"""The backwards of a stage: autograd runs, outside of autocast, and what waits is recorded."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from gapless.stage.batch.own_copies import together
from gapless.stage.guards.process_state import AtWork, here
from gapless.stage.norm.batchnorm_calls import recomputed
from gapless.stage.random.draws import alone
from gapless.stage.shared.weight_versions import places_of
from gapless.stage.split.call_mode import Mode
from gapless.stage.split.deferred import Records, is_viewed, recording

from .autocast import autocast_is_on, without_autocast

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()
_push: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
# What torch.autograd.backward calls in the end; on small tensors its checks cost a third of a backward.
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
_ONCE = False, False, (), True, True  # keep no graph, make none, for all leaves; unreachable ones may be; accumulate


class Backwards:
    """Those of one stage, of these layers, whose forwards run in `mode`. `split`: some of their gradients wait.
    `is_open`: there is code that is not torch's own; `are_compiled`: and some into which nobody can look.
    """

    def __init__(self, mode: Mode, layers: Iterable[Any], *, split: bool, is_open: bool, are_compiled: bool) -> None:
        self._mode, self._split, self._are_compiled = mode, split, are_compiled
        places = itertools.chain(*places_of(layers).values())  # where they are looked up: a stream puts others there
        self._homes = [(module._parameters, name) for module, name in places]
        self._at_work = AtWork(mode, "backward") if is_open and not are_compiled else AtWork(None)
        self.watching: TorchFunctionMode | None = None  # around those that are looked at for draws
        self.cold = False  # something was compiled in this step
        self.cold_seconds = 0.0
        self.alone_now = False  # those of this step put generators where they stood in first calls

    def run(self, records: Records, edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        """Runs one; what is deferred goes to `records`."""
        mode, watching = self._mode, None if self._are_compiled else self.watching
        found = [home.get(name) for home, name in self._homes]
        fresh = [each for each in found if each is not None and each.grad is None]
        if self.cold:  # torch compiles a backward when it first runs
            with alone():
                start = time.perf_counter()
                self._run_with_care(records, edges, grads)
                self.cold_seconds += time.perf_counter() - start
        elif (
            autocast_is_on()
            or mode.alone
            or self.alone_now
            or mode.statistics.in_checkpoints
            or (self._split and not grads[0].is_cpu)
        ):
            with _NOTHING if watching is None else watching:
                self._run_with_care(records, edges, grads)
        else:  # the same in less time
            work, others = here.work, recording.thread.value
            here.work = None if self._at_work.mode is None else self._at_work
            if self._split:
                recording.thread.value = records
            if watching is not None:
                _push(watching)
            try:
                _run_backward(tuple(edges), tuple(grads), *_ONCE)
            finally:
                if watching is not None:
                    _pop()
                here.work, recording.thread.value = work, others
        _own_memory(fresh)

    def _run_with_care(self, records: Records, edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
        statistics = self._mode.statistics
        with (
            self._at_work,
            without_autocast(),
            alone() if self._mode.alone or self.alone_now else _NOTHING,
            recomputed(statistics) if statistics.in_checkpoints else _NOTHING,
            recording.around(records, edges, grads[0].device) if self._split else _NOTHING,
        ):
            _run_backward(tuple(edges), tuple(grads), *_ONCE)


def _own_memory(parameters: Iterable[Parameter]) -> None:
    """Autograd keeps what it is given as `.grad`, a view too. Later microbatches add to it, so it must be no view of a
    gradient that is still to be used: by a W, or by the stage before this one.
    """
    found: dict[int, dict[Parameter, Tensor]] = {}  # by storage
    for each in parameters:
        grad = each.grad
        if type(grad) is Tensor and grad.layout is torch.strided:
            found.setdefault(grad.untyped_storage()._cdata, {})[each] = grad
    for grads in found.values():
        if is_viewed(next(iter(grads.values())), len(grads)):
            for each, copied in zip(grads, together([*grads.values()]), strict=True):
                each.grad = copied
