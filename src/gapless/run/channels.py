"""What a program needs from whatever carries its tensors: threads of one process, or processes.

A channel is (source device, target device, kind) and delivers in the producer's order. A device never waits for what it
sends.
"""

from collections.abc import Callable
from typing import Any, Protocol

from gapless.schedule.verify import Channel


class StoppedError(Exception):
    """Another device failed, so this one need not go on. Never reaches the user."""


class Transport(Protocol):
    """The channels of one program."""

    def sender(self, channel: Channel, *, idle: bool = False) -> Callable[[Any], None]:
        """Takes what the next producer of this channel has made, and does not wait. A device that is `idle` next, since
        it needs something from another one, may as well send it itself.
        """

    def receiver(self, channel: Channel) -> Callable[[], Any]:
        """Each call returns what the next consumer of this channel needs, and waits until it is there."""

    def stop(self) -> None:
        """Wake every device that waits; it raises StoppedError."""

    def clear(self) -> None:
        """Ready for the next step, whatever was left behind."""
