"""A link between the devices of one process that takes its time: a message arrives `seconds` after it was sent.

Threads hand over at once, so a latency has to be emulated, as the layers are: what is sent carries the time at which it
is there, and whoever takes it earlier waits until then. Nothing else differs from a pipeline as it is.
"""

import time
from collections.abc import Callable
from typing import Any

from gapless.run.channels import ThreadChannels, Transport
from gapless.run.one_process import OneProcess
from gapless.schedule.action import Schedule
from gapless.schedule.routes import Channel
from gapless.stage.devices import Devices, torch_devices
from gapless.zoo.emulated import wait_until


class LateChannels:
    """Other channels with a latency; with `one_by_one` a channel carries one message after another."""

    def __init__(self, inner: Transport, seconds: float, one_by_one: bool = False) -> None:
        self._inner, self._seconds, self._one_by_one = inner, seconds, one_by_one

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        send, seconds, free = self._inner.sender(channel, idle=idle), self._seconds, 0.0

        def put(result: Any) -> None:
            nonlocal free
            now = time.perf_counter()
            free = (max(now, free) if self._one_by_one else now) + seconds
            send((free, result))

        return put

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        receive = self._inner.receiver(channel)

        def take() -> Any:
            there, result = receive()
            wait_until(there)
            return result

        return take


def late(devices: Devices, seconds: float, *, one_by_one: bool = False) -> OneProcess:
    """Devices between which every message arrives so much later, and after those sent before it if `one_by_one`."""

    def channels(schedule: Schedule) -> Any:
        return LateChannels(ThreadChannels(schedule), seconds, one_by_one)

    return OneProcess(torch_devices(devices), channels=channels)
