"""A link between the devices of one process that takes its time: a message arrives `seconds` after it was sent.

Threads hand over at once, so a latency has to be emulated, as the layers are: what is sent carries the time at which it
is there, and whoever takes it earlier waits until then. Nothing else differs from a pipeline as it is.
"""

import time
from collections.abc import Callable
from typing import Any

from gapless.run.channels import ThreadChannels, Transport
from gapless.run.one_process import OneProcess
from gapless.schedule.routes import Channel
from gapless.stage.devices import Devices, torch_devices
from gapless.zoo.emulated import wait_until


class LateChannels:
    """Other channels with a latency."""

    def __init__(self, inner: Transport, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def in_stream(self, channel: Channel) -> bool:
        return self._inner.in_stream(channel)

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        send, seconds = self._inner.sender(channel, idle=idle), self._seconds
        return lambda result: send((time.perf_counter() + seconds, result))

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        receive = self._inner.receiver(channel)

        def take() -> Any:
            there, result = receive()
            wait_until(there)
            return result

        return take

    def stop(self) -> None:
        self._inner.stop()

    def clear(self) -> None:
        self._inner.clear()


def late(devices: Devices, seconds: float) -> OneProcess:
    """Devices between which every message arrives so much later."""
    return OneProcess(torch_devices(devices), channels=lambda schedule: LateChannels(ThreadChannels(schedule), seconds))
