"""All ranks make the same calls. Those that do not are told at once, every one of them, and never take each other's
messages: an evaluation on one rank left gradients in the channel, and every later step trained on those of an older
batch.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import GaplessError
from tests.run.forked import Launch
from tests.run.ranks.watch.test_watch import pipeline

AT_ONCE = 30.0  # seconds, on a busy machine; `timeout` is 60


def batch(count: int = 16) -> tuple[Tensor, Tensor]:
    return torch.ones(count, 6), torch.zeros(count, 6)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 6)]


def in_eval_mode(pipe: gapless.Pipeline) -> None:
    pipe.eval()
    pipe.step(*batch())


def measured(pipe: gapless.Pipeline) -> None:
    pipe.timeline = True
    pipe.step(*batch())


def saved(pipe: gapless.Pipeline) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pipe.save(Path(folder, f"of rank {dist.get_rank()}"), torch.optim.SGD(pipe.parameters(), lr=0.1))


def loaded(pipe: gapless.Pipeline) -> None:
    pipe.load_state_dict(pipe.state_dict(whole=False), strict=False)


CALLS: dict[str, Callable[[gapless.Pipeline], Any]] = {
    "step": lambda pipe: pipe.step(*batch()),
    "evaluate": lambda pipe: pipe.evaluate(*batch()),
    "clip": lambda pipe: pipe.clip_grad_norm_(1.0),
    "clip to 2": lambda pipe: pipe.clip_grad_norm_(2.0),
    "clip another norm": lambda pipe: pipe.clip_grad_norm_(1.0, float("inf")),
    "state_dict": lambda pipe: pipe.state_dict(),
    "load_state_dict": loaded,
    "half a step": lambda pipe: pipe.step(*batch(), weight=0.5),
    "step without an exchange": lambda pipe: pipe.step(*batch(), sync=False),
    "step in eval mode": in_eval_mode,
    "measured step": measured,
    "small step": lambda pipe: pipe.step(*batch(3)),
    "refused step": lambda pipe: pipe.step(*batch(0)),
    "shares": lambda pipe: pipe.shares([batch(), batch()]),
    "save": saved,
    "nothing": lambda pipe: None,
}


def differ(seed: str) -> None:
    """Two kinds of ranks, each with its own call. All raise in it, or else in the next."""
    chance, me, ranks = random.Random(int(seed)), dist.get_rank(), dist.get_world_size()
    names = ("pp",) if ranks == 2 else ("dp", "pp")
    mesh = init_device_mesh("cpu", (ranks,) if ranks == 2 else (2, 2), mesh_dim_names=names)
    for _ in range(24 // ranks):
        one, other = chance.sample(list(CALLS), 2)
        odd = chance.randrange(ranks)
        before, transport = chance.choice([0, 1, 9]), chance.choice(["auto", "gloo"])
        mine = other if me == odd else one
        words = f"{one}, but {other} on rank {odd} of {ranks}, after {before} steps, {transport}, seed {seed}"
        pipe = pipeline(layers(), mesh=mesh, timeout=60.0, transport=transport)
        began, said = time.monotonic(), ""
        try:
            for call in (*["step"] * before, mine, "step", "step"):  # others may fail while this one ends the last
                CALLS[call](pipe)
        except GaplessError as error:
            said = str(error)
        assert said, f"{words}: no word"
        assert time.monotonic() - began < AT_ONCE, f"{words}: {said}"
        pipe.close()
        dist.barrier()


@pytest.mark.parametrize(
    ("ranks", "seed"), [(4, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (2, 1), (4, 0)))]
)
def test_ranks_that_make_different_calls_are_told_at_once(launch: Launch, ranks: int, seed: int) -> None:
    launch(differ, ranks, str(seed), timeout=240)
