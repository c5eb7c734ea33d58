"""A forked child has the memory and the open files of its parent, but none of its threads. It is no rank, and whatever
it ends or closes is its parent's as well:

    groups             destroyed in the child, they take the parent's sockets out of its epoll   stay for ever
    ring and inbox     a copy keeps them open when the parent is dead                            closed
    SIGTERM            our handler takes a note that nobody there will read                      as it was before
    `close`            would tell the other ranks that this one leaves                           does nothing

A SIGTERM that comes before the handler is gone would be lost, so it is held back until then. Python calls back what was
registered for a fork, and never lets go of it; hence one set of functions, and a set of those who are there.
"""

import os
import signal
import threading
import weakref
from typing import Protocol

import torch.distributed as dist

from gapless.run.ranks.wire.groups import keep_for_ever


class Inherited(Protocol):
    """What a forked child has too, and must not have."""

    def in_child(self) -> None:
        """This is a forked child now: let go of what must not be there twice."""


_living: "weakref.WeakSet[Inherited]" = weakref.WeakSet()


def tell_in_child(one: Inherited) -> None:
    """For as long as it lives."""
    _living.add(one)


class _Mask(threading.local):
    """The signals that a thread had blocked before it began to fork."""

    before: set[signal.Signals | int] | None = None

    def hold_back(self) -> None:
        if _living:
            self.before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def let_go(self) -> None:
        if self.before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
            self.before = None


_mask = _Mask()


def _in_child() -> None:
    try:
        # Torch's own groups hang in a child that ends, for the same reason.
        if _living and dist.is_available() and dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                keep_for_ever(group)
        for one in list(_living):
            one.in_child()
    finally:
        _mask.let_go()


os.register_at_fork(before=_mask.hold_back, after_in_parent=_mask.let_go, after_in_child=_in_child)
