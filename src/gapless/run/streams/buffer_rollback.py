"""Buffers that forwards change, as the statistics of a batch norm, go back with the minibatches that are dropped.

A stream that stops in the middle drops minibatches whose forwards some stages have run already. The weights know
nothing of them, and then neither do the buffers.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gapless.stage.guards.changing_buffers import Copy, Owned, copied, owned_by


class BufferRollback:
    """Of the layers of a stage, as they were before each minibatch that is under way. What does not change is copied
    once.
    """

    def __init__(self) -> None:
        self._owned: list[Owned] = []
        self._last: dict[Owned, Copy] = {}
        self._before: dict[int, dict[Owned, Copy]] = {}

    def begin(self, layers: Iterable[Any]) -> None:
        """A flow starts, with these."""
        self._owned = [each for layer in layers if isinstance(layer, nn.Module) for each in owned_by(layer)]
        self._last.clear()

    def keep(self, minibatch: int) -> None:
        """Its first forward comes next."""
        found = {}
        for module, name in self._owned:
            value, last = module._buffers.get(name), self._last.get((module, name))
            if value is None:
                continue
            # The kernel of a batch norm changes them without telling.
            if last is None or isinstance(module, _BatchNorm) or last.is_changed(by_value=False):
                last = copied(module, name, value)
            found[module, name] = last
        self._before[minibatch], self._last = found, found

    def forget(self, minibatch: int) -> None:
        """It has gone into the weights."""
        self._before.pop(minibatch, None)

    def put_back(self, minibatch: int) -> None:
        """It is dropped, and so are those after it."""
        with torch.no_grad():
            for (module, name), each in self._before.get(minibatch, {}).items():
                if isinstance(module, _BatchNorm) or each.is_changed(by_value=False):
                    module._buffers[name] = each.value
                    each.value.copy_(each.numbers)
        self.clear()

    def clear(self) -> None:
        """Nothing is under way."""
        self._before.clear()
        self._last.clear()
