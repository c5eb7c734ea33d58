"""For whom a backward runs: what autograd calls on its way asks for it, in whatever thread.

On a CPU a backward runs in the thread that starts it. On an accelerator it runs in threads of autograd's own, so there
its graph task says whose it is.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.graph import GradientEdge

T = TypeVar("T")


class _Thread(threading.local):
    value: Any = None


class Running(Generic[T]):
    """What the backwards that are running were started with."""

    def __init__(self) -> None:
        self.thread = _Thread()  # what runs in this thread, as on a CPU
        self._tasks: dict[int, T] = {}

    def now(self) -> T | None:
        """Of the backward that has called us; None where none was started with anything."""
        value: T | None = self.thread.value
        if value is None and self._tasks:
            value = self._tasks.get(torch._C._current_graph_task_id())
        return value

    def around(self, value: T, edges: Sequence[GradientEdge], device: torch.device) -> AbstractContextManager[None]:
        """Around the backward that starts at these edges, on this device."""
        return _Here(self.thread, value) if device.type == "cpu" else self._noted(value, edges)

    @contextlib.contextmanager
    def _noted(self, value: T, edges: Sequence[GradientEdge]) -> Iterator[None]:
        """The nodes that add to a parameter are left out: stages that share it share that node, and one's task would be
        taken for the other's.
        """
        tasks: set[int] = set()

        def note(_: Any) -> None:
            task = torch._C._current_graph_task_id()
            tasks.add(task)
            self._tasks[task] = value

        nodes = [edge.node for edge in edges if type(edge.node).__name__ != "AccumulateGrad"]
        handles = [node.register_prehook(note) for node in nodes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for task in tasks:
                self._tasks.pop(task, None)


class _Here(AbstractContextManager[None]):
    """A class of its own, since a generator would cost more than a small backward."""

    __slots__ = ("_thread", "_value")

    def __init__(self, thread: _Thread, value: Any) -> None:
        self._thread, self._value = thread, value

    def __enter__(self) -> None:
        self._thread.value = self._value

    def __exit__(self, *_: object) -> None:
        self._thread.value = None
