"""Buffers that a forward changes: counters, moving averages, the vectors of a spectral norm.

Where remat runs a forward again, the second run must start from what the first started from, and leave no trace:

    first run     starts from v0, leaves v1          v0 is kept with the microbatch
    others        leave v2, v3
    second run    starts from v0, leaves v1 again    in a copy; v3 stays

Most buffers never change, and only those that did are kept. Batch norm is counted elsewhere (`batchnorm`), except in a
compiled layer, where nothing can be seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .compiled import is_compiled

Taken = list[tuple[nn.Module, str, Tensor]]


class Buffers:
    """The buffers of some layers."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = [(layer, is_compiled(layer)) for layer in layers if isinstance(layer, nn.Module)]
        self._changing: set[tuple[nn.Module, str]] = set()
        self._before: list[tuple[nn.Module, str, Tensor, int]] = []
        self._tried = False

    def taken(self) -> Taken:
        """Before a first run: copies of those that change, or of all while nothing is known of them."""
        self._before = [(module, name, value, value._version) for module, name, value in self._all()]
        return [
            (module, name, value.clone())
            for module, name, value, _ in self._before
            if not self._tried or (module, name) in self._changing
        ]

    def learn(self, taken: Taken) -> Taken:
        """After a first run: of what was taken only what changes."""
        for module, name, value, version in self._before:
            now = module._buffers.get(name)
            if now is not value or value._version != version:
                self._changing.add((module, name))
        self._before.clear()
        self._tried = True
        return [item for item in taken if item[:2] in self._changing]

    @contextlib.contextmanager
    def replayed(self, taken: Taken) -> Iterator[None]:
        """Around a second run."""
        present = [(module, name, module._buffers[name]) for module, name, _ in taken]
        for module, name, value in taken:
            module._buffers[name] = value
        try:
            yield
        finally:
            for module, name, now in present:
                module._buffers[name] = now

    def _all(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for layer, hidden in self._layers:
            for module in layer.modules():
                norm = isinstance(module, _NormBase)
                for name, value in module._buffers.items():
                    if value is None or (norm and not hidden):
                        continue
                    if norm:
                        self._changing.add((module, name))  # a kernel changes them without telling
                    yield module, name, value
