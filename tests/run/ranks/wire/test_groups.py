"""Groups of ranks: what ends a wait in them."""

import time

import pytest
import torch
import torch.distributed as dist

from gapless.run.ranks.wire.groups import connected, network_device
from tests.run.forked import Launch


def forgotten() -> None:
    me = dist.get_rank()
    group = connected("mine", (0, 1), me, network_device())
    assert group is not None
    rows, mine = [torch.empty(4) for _ in range(2)], torch.ones(4)
    group.allgather([rows], [mine]).wait()
    assert torch.stack(rows).sum() == 8
    if me == 0:
        waiting = group.allgather([rows], [mine])
        group.is_broken = True  # and yet Gloo goes on waiting
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            waiting.wait()
        group.close()
        del group, waiting  # would wait for its thread
        assert time.monotonic() - began < 20


def test_nobody_waits_for_what_gloo_has_forgotten_in_a_broken_group(launch: Launch) -> None:
    """A collective that was under way when the connections closed sometimes never ended, and its rank was killed."""
    launch(forgotten, 2)
