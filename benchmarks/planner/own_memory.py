"""Devices that share a memory, as if each had its own: what comes from another one is copied on arrival."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gapless.run.lanes import CudaLane, Lane, Parcel, make_lane
from gapless.run.one_process import OneProcess
from gapless.stage.batch import microbatch as mb
from gapless.stage.devices import Devices, torch_devices

Around = Callable[[], AbstractContextManager[object]]


class Apart(OneProcess):
    """`around`: of each device, what to do around a copy."""

    def __init__(self, devices: Devices, around: Sequence[Around] | None = None) -> None:
        places = torch_devices(devices)
        doing = around or [nullcontext] * len(places)
        super().__init__(places, lanes=[_apart(make_lane(each), do) for each, do in zip(places, doing, strict=True)])


def _apart(lane: Any, around: Around) -> Any:
    """A lane that is no longer one of those which share a memory."""
    copying = _copying(lane, around)
    if not isinstance(lane, CudaLane):
        return _Apart(lane, copying)
    lane.unpack = copying  # type: ignore[assignment, method-assign]
    return lane


class _Apart:
    def __init__(self, lane: Lane, unpack: Callable[[Parcel], Any]) -> None:
        self._lane, self.unpack = lane, unpack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


def _copying(lane: Lane, around: Around) -> Callable[[Parcel], Any]:
    unpack = lane.unpack

    def run(parcel: Parcel) -> Any:
        with around():
            sent = mb.flatten(parcel.tree)[0]
            tensors, shape = mb.flatten(unpack(parcel))
            made = [
                mine.detach().clone().requires_grad_(mine.requires_grad) if mine is its else mine
                for mine, its in zip(tensors, sent, strict=True)
            ]
            return mb.unflatten(made, shape)

    return run
