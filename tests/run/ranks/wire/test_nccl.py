"""What of NCCL's groups needs no GPU."""

import threading
import time

from gapless.run.ranks.wire.nccl import abort_all


class Entangled:
    """To abort it ends when all were asked to, as with communicators whose kernels wait for one dead rank."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together, self.aborted = together, False

    def abort(self) -> None:
        self._together.wait()
        self.aborted = True


def test_groups_are_aborted_at_the_same_time() -> None:
    """One after another they waited for each other, and the rank stayed."""
    together = threading.Barrier(4)
    groups = [Entangled(together) for _ in range(4)]
    abort_all(groups, patience=20.0)
    assert all(group.aborted for group in groups)


def test_a_group_that_can_not_be_aborted_is_left_behind() -> None:
    together = threading.Barrier(2)
    began = time.monotonic()
    abort_all([Entangled(together)], patience=0.2)
    assert time.monotonic() - began < 10.0
    together.abort()
