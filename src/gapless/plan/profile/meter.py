"""Bytes that are held, and the most that were: of the storages themselves, so that views and shared tensors count once.

A dispatch mode sees every tensor that is made and notes when its storage dies. That works on the CPU and for tensors
without data, whose FLOPs it counts, too; a GPU's own allocator also knows what kernels take for themselves.
"""

import gc
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gapless.plan.profile.profile import SLACK

aten = torch.ops.aten
# Attention on the CPU, which torch does not count: FLOPs for each number of the queries and each key.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 10,
}
_WITHOUT_WEIGHTS = {aten.bmm, aten.baddbmm, *_ATTENTION}


class FlopCount(NamedTuple):
    """FLOPs of everything, and of products with weights alone."""

    flops: int
    weight_flops: int


class StorageMeter(TorchDispatchMode):
    """Counts what is made while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = self._most = 0
        self._work = FlopCount(0, 0)
        self._known: set[int] = set()
        self._lock = threading.RLock()  # what dies, dies in any thread, also while this one is here

    def on(self) -> AbstractContextManager[object]:
        """Around all that is to be counted."""
        return self

    def live(self) -> int:
        """Bytes held now."""
        return self._live

    def peak(self) -> int:
        """The most since the last call of this."""
        most, self._most = self._most, self._live
        return most

    def counted(self) -> FlopCount:
        """FLOPs since the last call of this."""
        work, self._work = self._work, FlopCount(0, 0)
        return work

    def clear_libraries(self) -> int:
        """Has the device's libraries give back what they keep from call to call; how much that was."""
        return 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(storage) for storage in _storages(pytree.tree_leaves((args, kwargs)))}
        for storage in _storages(pytree.tree_leaves(result)):
            if id(storage) not in given:
                self._note(storage)
        self._count(func._overloadpacket, args, kwargs or {}, result)
        return result

    def _count(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        if operator in _ATTENTION:
            flops = _ATTENTION[operator] * args[0].numel() * args[2].shape[-2]  # a gradient is as large as a query
        elif operator is aten._grouped_mm:
            flops = 2 * args[0].numel() * args[1].shape[-1]
        elif operator in flop_registry:
            flops = flop_registry[operator](*args, **kwargs, out_val=result)
        else:
            return
        weights = 0 if operator in _WITHOUT_WEIGHTS else flops
        self._work = FlopCount(self._work.flops + flops, self._work.weight_flops + weights)

    def _note(self, storage: torch.UntypedStorage) -> None:
        number, size = id(storage), storage.nbytes()
        with self._lock:
            if number in self._known or not size:
                return
            self._known.add(number)
            self._live += size
            self._most = max(self._most, self._live)
        weakref.finalize(storage, self._died, number, size)

    def _died(self, number: int, size: int) -> None:
        with self._lock:
            self._known.discard(number)
            self._live -= size


class GpuMeter:
    """Asks the allocator. What one block is rounded up to counts as well."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def on(self) -> Iterator[None]:
        """Python's collector rests: what it freed meanwhile, of an earlier pipeline say, would count as ours."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()

    def live(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most

    def counted(self) -> FlopCount:
        return FlopCount(0, 0)

    def clear_libraries(self) -> int:
        before = self.live()
        clear_workspaces()
        return before - self.live()


Meter = StorageMeter | GpuMeter


def meter_for(device: torch.device, *, fake: bool = False) -> Meter:
    """`fake`: of tensors without data, which no allocator knows."""
    return GpuMeter(device) if device.type == "cuda" and not fake else StorageMeter()


def clear_workspaces() -> None:
    """cuBLAS lets go of its memory on all streams, and takes it again at its next product there."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


# What torch's allocator loses on a GPU: measured on an H200 with torch 2.11, as the least limit under which a step runs
# less all that is live at its peak (`python -m benchmarks plan --fit`), as a share of what comes and goes.
EXPANDABLE_SLACK = 0.06  # with expandable segments: up to 4.9%, 25 settings
SEGMENTED_SLACK = 0.25  # without: up to 24%, 10 settings
PAGE = 20 * 2**20  # it takes memory from the driver by these, and the last one is not full


def allocator_slack(device: torch.device) -> float:
    """What the allocator of this device loses as it is set now, as a share of what comes and goes."""
    if device.type != "cuda":
        return SLACK
    return EXPANDABLE_SLACK if has_expandable_segments(device) else SEGMENTED_SLACK


def has_expandable_segments(gpu: torch.device) -> bool:
    """Whether torch's allocator is set to PYTORCH_ALLOC_CONF=expandable_segments:True, or is CUDA's own."""
    if torch.cuda.get_allocator_backend() != "native":
        return True
    torch.cuda.empty_cache()
    one = torch.empty(PAGE, dtype=torch.uint8, device=gpu)
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= one.data_ptr() < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return False


def _storages(leaves: Iterable[Any]) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    found = {storage._cdata: storage.nbytes() for storage in _storages(tensors)}
    return sum(found.values())
