"""Devices that share a memory, as if each had its own: what comes from another one is copied on arrival."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gapless.pipeline.pipeline import Pipeline
from gapless.run.lanes import CudaLane, Lane, Parcel
from gapless.stage import microbatch as mb

Around = Callable[[], AbstractContextManager[object]]


def keep_apart(pipe: Pipeline, around: Sequence[Around] | None = None) -> None:
    """Before the first step. `around`: of each device, what to do around a copy."""
    lanes: list[Any] = pipe._world.lanes
    for device, lane in enumerate(lanes):
        copying = _copying(lane, around[device] if around else nullcontext)
        if isinstance(lane, CudaLane):
            lane.unpack = copying  # type: ignore[assignment, method-assign]
        else:
            lanes[device] = _Apart(lane, copying)


class _Apart:
    """A lane that is no longer one of those which share a memory."""

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
