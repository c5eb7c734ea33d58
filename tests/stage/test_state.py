"""State that a forward changes, where it runs again: in torch.utils.checkpoint and with remat. As in the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gapless.errors import ConfigError

from .state_loops import Clock, Made, assert_same_as_loop, linear

BEGINS = (0, 3)
SCHEDULES = ("gpipe", "1f1b", "zb-h1")


class Settings:
    temperature = 1.0


CHECKPOINTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "plain": lambda compute, x: checkpoint(compute, x, use_reentrant=False),
    "without generators": lambda compute, x: checkpoint(compute, x, use_reentrant=False, preserve_rng_state=False),
    "reentrant": lambda compute, x: checkpoint(compute, x, use_reentrant=True, preserve_rng_state=False),
}
if hasattr(torch.utils.checkpoint, "_checkpoint_impl"):  # from torch 2.15 on
    CHECKPOINTS["decorator"] = lambda compute, x: cast(Any, checkpoint)(use_reentrant=False)(compute)(x)


class Stateful(nn.Module):
    """Anneals and counts, from a step on, or where the data says so."""

    scale: Tensor

    def __init__(
        self, kind: str, clock: Clock, begins: int, *, by_data: bool = False, checkpoints: str | None = None
    ) -> None:
        super().__init__()
        self.linear, self.kind, self.clock, self.begins = linear(), kind, clock, begins
        self.by_data, self.checkpoints = by_data, checkpoints
        scale = 1.0

        def anneal() -> None:
            nonlocal scale
            scale *= 0.9

        self.anneal: Callable[[], None] = anneal
        self.annealed: Callable[[], float] = lambda: scale
        self.count, self.seen, self.table, self.settings = 0, list[float](), {"t": 1.0}, Settings()
        self.mean, self.in_place = torch.zeros(6), torch.zeros(6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        if self.clock.step >= self.begins and (not self.by_data or bool(x.mean() > 0)):
            self.change(x.detach())
        return CHECKPOINTS[self.checkpoints](self.compute, x) if self.checkpoints else self.compute(x)

    def change(self, x: Tensor) -> None:
        if self.kind == "counter":
            self.count += 1
        elif self.kind == "list":
            self.seen.append(float(x.mean()))
        elif self.kind == "dict":
            self.table["t"] *= 0.9
        elif self.kind == "object":
            self.settings.temperature *= 0.9
        elif self.kind == "closure":
            self.anneal()
        elif self.kind == "average":
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        elif self.kind == "average in place":
            self.in_place.mul_(0.9).add_(x.mean(0))
        else:
            self.scale.mul_(0.9)

    def compute(self, x: Tensor) -> Tensor:
        factor = 1 + 0.1 * self.count + sum(self.seen[-2:]) + self.table["t"] * self.settings.temperature
        x = x * factor * self.annealed() * self.scale.clone()
        x = torch.tanh(self.linear(x if self.checkpoints else x * (1 + self.mean * self.in_place.clone())))
        return F.dropout(x, 0.2) if self.checkpoints == "plain" else x

    def state(self) -> Any:
        held = self.count, list(self.seen), dict(self.table), self.settings.temperature, self.annealed()
        return *held, self.mean.tolist(), self.in_place.tolist()


def state_of(layers: Sequence[Any]) -> Any:
    return [each.state() for each in layers if isinstance(each, Stateful)]


def around(make: Callable[[], nn.Module]) -> Made:
    return [linear(), make(), linear(), make(), linear()], F.mse_loss


@pytest.mark.in_pairs
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("begins", "by_data"), [(0, False), (0, True), (3, False), (3, True)])
@pytest.mark.parametrize("kind", ["counter", "list", "dict", "object", "closure"])
def test_a_checkpoint_finds_what_its_forward_has_left(
    kind: str, begins: int, by_data: bool, schedule: str, checkpoints: str
) -> None:
    """What changes was learnt in the first forward, and at steps 1, 2, 4 and so on; what began at step 3 was not
    undone.
    """

    def make(clock: Clock) -> Made:
        return around(lambda: Stateful(kind, clock, begins, by_data=by_data, checkpoints=checkpoints))

    assert_same_as_loop(make, schedule=schedule, state=state_of)


@pytest.mark.parametrize(("begins", "by_data"), [(0, False), (3, False), (3, True)])
def test_a_buffer_that_has_moved_on_since_is_refused_in_a_checkpoint(begins: int, by_data: bool) -> None:
    def make(clock: Clock) -> Made:
        return around(lambda: Stateful("buffer", clock, begins, by_data=by_data, checkpoints="plain"))

    with pytest.raises(ConfigError, match=r"a backward of stage \d uses the buffer Stateful.scale, .* or use remat="):
        assert_same_as_loop(make, schedule="gpipe")
    assert_same_as_loop(make, microbatches=1, state=state_of)


def test_a_checkpoint_that_changes_state_after_later_forwards_have_is_refused() -> None:
    class Counts(Stateful):
        def compute(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().compute(x)

    def make(clock: Clock) -> Made:
        return around(lambda: Counts("none", clock, 9, checkpoints="plain"))

    with pytest.raises(ConfigError, match=r"a backward of stage \d uses Counts.count, as torch.utils.checkpoint does"):
        assert_same_as_loop(make, schedule="gpipe")
    assert_same_as_loop(make, microbatches=1, state=state_of)


@pytest.mark.in_pairs
@pytest.mark.parametrize("remat", ["stage", "layer"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("begins", "by_data"), [(0, False), (0, True), (3, False), (3, True)])
@pytest.mark.parametrize("kind", ["counter", "list", "dict", "object", "closure", "average", "buffer"])
def test_a_recompute_leaves_no_trace(kind: str, begins: int, by_data: bool, schedule: str, remat: str) -> None:
    def make(clock: Clock) -> Made:
        return around(lambda: Stateful(kind, clock, begins, by_data=by_data))

    assert_same_as_loop(make, schedule=schedule, remat=remat, state=state_of)


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_nor_does_it_in_a_tensor_that_changes_in_place_from_the_first_forward_on(remat: str) -> None:
    make = lambda clock: around(lambda: Stateful("average in place", clock, 0))  # noqa: E731
    assert_same_as_loop(make, schedule="gpipe", remat=remat, state=state_of)


@pytest.mark.parametrize("remat", ["stage", "layer"])
@pytest.mark.parametrize("begins", BEGINS)
def test_a_loss_with_state_counts_a_microbatch_once(begins: int, remat: str) -> None:
    class Counting(nn.Module):
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock, self.count, self.seen = clock, 0, list[float]()

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            value = F.mse_loss(out, target)
            if self.clock.step >= begins:
                self.count += 1
                self.seen.append(float(value))
            return value * (1 + 0.1 * self.count)

    losses: list[Counting] = []

    def make(clock: Clock) -> Made:
        losses.append(Counting(clock))
        return [linear(), linear(), linear()], losses[-1]

    assert_same_as_loop(make, remat=remat, state=lambda _: (losses[-1].count, list(losses[-1].seen)))
