"""One action as a CUDA graph: captured once, then launched as a whole, however many kernels it has.

What a graph writes is at fixed places in its pool. Whoever captures next into the same pool may write there too, so
what a replay has left is read at once (`borrowed`), and only what a pool's own next graph needs stays.

A seed can't change during a capture, and every layer draws from a seed of its own: each layer that draws has a
generator, which takes the place of torch's while the layer is captured, and is seeded before every replay.
"""

import contextlib
import gc
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from gapless.stage.random.draws import Draws
from gapless.stage.random.exclusive import exclusively

T = TypeVar("T")
Pool = Any  # of torch.cuda.graph_pool_handle


class Pools(dict[int, Pool]):
    """Memory of graphs, by number: a new one when it is first asked for."""

    def __missing__(self, number: int) -> Pool:
        made = self[number] = torch.cuda.graph_pool_handle()
        return made


class Replay:
    """A captured action."""

    __slots__ = ("_generators", "_graph")

    def __init__(self, graph: torch.cuda.CUDAGraph, generators: Mapping[int, torch.Generator]) -> None:
        self._graph = graph
        self._generators = list(generators.items())

    def run(self, seed: Callable[[int], int]) -> None:
        """Launches it on the stream that is current; `seed` is that of a layer."""
        for layer, generator in self._generators:
            generator.manual_seed(seed(layer))
        self._graph.replay()


def captured(run: Callable[[], T], pool: Pool, draws: Draws, layers: Collection[int]) -> tuple[Replay, T]:
    """What `run` launches, as a graph; nothing of it is computed yet. `layers` are those that may draw.

    One capture at a time: torch's default generators belong to it. Nothing is collected meanwhile, since freeing what
    other graphs hold is no part of this one.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    generators = {layer: torch.Generator(device) for layer in layers}
    graph = _graph(generators)
    with exclusively():
        collects = gc.isenabled()
        gc.disable()
        try:
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                with draws.captured(generators):
                    result = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the same again
                    torch.zeros((), device=device)  # torch warns of an empty one
                with contextlib.suppress(RuntimeError):
                    _end(graph, pool, generators)
                raise
            _end(graph, pool, generators)
        finally:
            if collects:
                gc.enable()
    return Replay(graph, generators), result


def _graph(generators: Mapping[int, torch.Generator]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for generator in generators.values():
        graph.register_generator_state(generator)
    return graph


def _end(graph: torch.cuda.CUDAGraph, pool: Pool, generators: Mapping[int, torch.Generator]) -> None:
    """Ends a capture. Where that fails, torch leaves its allocator and its generators as if it were still going on: the
    one is told, and an empty capture puts right the others.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
        again = _graph(generators)
        again.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        torch.zeros((), device=f"cuda:{device}")
        again.capture_end()
        raise


def borrowed(tensor: Tensor) -> Tensor:
    """The same memory, which this one does not keep."""
    storage = tensor.untyped_storage()
    place = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())
