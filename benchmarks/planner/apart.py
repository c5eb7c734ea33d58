"""Devices of one process as if they were apart: each with a memory of its own, so what comes from another one is copied
on arrival; or with a link that takes its time, so a message arrives `seconds` after it was sent.

Threads hand over at once, so a latency has to be emulated, as the layers are: what is sent carries the time at which it
is there, and whoever takes it earlier waits until then. Nothing else differs from a pipeline as it is.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from gapless.run.channels import ThreadChannels
from gapless.run.lanes import CudaLane, Lane, Parcel, make_lane
from gapless.run.one_process import OneProcess
from gapless.schedule.action import Schedule
from gapless.schedule.routes import Channel
from gapless.stage.batch import microbatch as mb
from gapless.stage.devices import Devices, torch_devices
from gapless.zoo.emulated import wait_until


class Apart(OneProcess):
    """`around`: of each device, what to do around all that it computes."""

    def __init__(self, devices: Devices, around: Sequence[Callable[[], AbstractContextManager[object]]] = ()) -> None:
        places = torch_devices(devices)
        lanes = [_apart(make_lane(each)) for each in places]
        for lane, entered in zip(lanes, around, strict=False):
            lane.entered = entered
        super().__init__(places, lanes=lanes)


def _apart(lane: Any) -> Any:
    """A lane that is no longer one of those which share a memory."""
    unpack = lane.unpack

    def copying(parcel: Parcel) -> Any:
        sent = mb.flatten(parcel.tree)[0]
        tensors, shape = mb.flatten(unpack(parcel))
        made = [
            mine.detach().clone().requires_grad_(mine.requires_grad) if mine is its else mine
            for mine, its in zip(tensors, sent, strict=True)
        ]
        return mb.unflatten(made, shape)

    made: Any = lane if isinstance(lane, CudaLane) else _ApartLane(lane)
    made.unpack = copying
    return made


class _ApartLane:
    unpack: Any

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


class _LateChannels(ThreadChannels):
    """With a latency; with `one_by_one` a channel carries one message after another."""

    def __init__(self, schedule: Schedule, seconds: float, one_by_one: bool) -> None:
        super().__init__(schedule)
        self._seconds, self._one_by_one = seconds, one_by_one

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        send, free = super().sender(channel, idle=idle), 0.0

        def put(result: Any) -> None:
            nonlocal free
            now = time.perf_counter()
            free = (max(now, free) if self._one_by_one else now) + self._seconds
            send((free, result))

        return put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        receive = super().receiver(channel)

        def take() -> Any:
            there, result = receive()
            wait_until(there)
            return result

        return take


def late(devices: Devices, seconds: float, *, one_by_one: bool = False) -> OneProcess:
    """Devices between which every message arrives so much later, and after those sent before it if `one_by_one`."""
    channels = partial(_LateChannels, seconds=seconds, one_by_one=one_by_one)
    return OneProcess(torch_devices(devices), channels=channels)
