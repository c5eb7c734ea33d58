"""Layers that were seen to draw nothing run unseen, until they begin to."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.stage.random.drawless_layers import Unwatched
from tests.by_hand import seeded_loop
from tests.pipelines import Own, assert_same_gradients

STEPS, LATE = 5, 3


@torch.jit.script
def scripted_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def seeds_itself(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x * torch.rand(())


class Late(nn.Module):
    """Begins to draw in its fourth step."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.draw, self.now = nn.Linear(4, 4), draw, False

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        return self.draw(x) if self.now else x


def training(model: nn.Sequential, change: Callable[[nn.Sequential], None], **options: Any) -> None:
    """Against a loop that a user would write."""
    plain, x = copy.deepcopy(model), torch.randn(6, 4)
    state = torch.get_rng_state()
    with gapless.Pipeline(model, devices=1, microbatches=3, loss=F.mse_loss, seed=7, **options) as pipe:
        for step in range(STEPS):
            if step == LATE:
                change(model)
            torch.set_rng_state(state)
            pipe.zero_grad()
            loss = pipe.step(x, x).loss
            assert torch.equal(torch.get_rng_state(), state), "the caller's generator has moved"
            plain.zero_grad()
            if step == LATE:
                change(plain)
            losses = seeded_loop(plain, x, x, microbatches=3, seed=7, step=step)
            assert torch.equal(sum(one * (2 / 6) for one in losses), loss), step  # type: ignore[arg-type]
            assert_same_gradients(model, plain, f"step {step}")


def begins(model: nn.Sequential) -> None:
    for layer in model:
        if isinstance(layer, Late):
            layer.now = True


def added(draw: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: x + draw(x.sigmoid())


@pytest.mark.parametrize("draw", [torch.bernoulli, torch.rand_like, F.dropout, scripted_noise, seeds_itself])
@pytest.mark.parametrize("remat", ["none", "layer"])
def test_a_layer_that_begins_to_draw(draw: Any, remat: Any) -> None:
    model = nn.Sequential(Late(lambda x: x), Late(added(draw)), nn.Linear(4, 4), Late(lambda x: x))
    training(model, begins, remat=remat)


def test_a_dropout_that_gets_a_probability_and_a_hook_that_draws() -> None:
    def change(model: nn.Sequential) -> None:
        model[1].dropout.p = 0.5  # type: ignore[union-attr]
        model[3].register_forward_hook(lambda module, args, out: out * torch.rand(()))

    torch.manual_seed(0)
    noise = Own(lambda noise, x: noise.dropout(x), dropout=nn.Dropout(0.0))
    training(nn.Sequential(nn.Linear(4, 4), noise, nn.Linear(4, 4), Late(lambda x: x)), change)


def test_a_batch_norm_that_begins_to_count() -> None:
    norm, x = nn.BatchNorm1d(4).eval(), torch.randn(6, 4)
    normed = Own(lambda normed, x: normed.norm(x), norm=norm)
    model = nn.Sequential(nn.Linear(4, 4), normed, nn.Linear(4, 4))
    with gapless.Pipeline(model, devices=1, microbatches=3, loss=F.mse_loss, batchnorm="deferred") as pipe:
        for step in range(STEPS):
            if step == LATE:
                norm.train()
            pipe.step(x, x)
    assert norm.num_batches_tracked == STEPS - LATE


def own_norm() -> nn.Module:
    """A batch norm of the user's own, whose buffers have other names than torch's."""
    held = {"mean": nn.Buffer(torch.zeros(4)), "variance": nn.Buffer(torch.ones(4))}
    return Own(lambda norm, x: F.batch_norm(x, norm.mean, norm.variance, training=True), **held)


def test_a_batch_norm_of_the_users_own_goes_on_to_be_deferred() -> None:
    own, x = own_norm(), torch.randn(12, 4)
    torchs = nn.BatchNorm1d(4, affine=False)
    for norm in (own, torchs):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4))
        with gapless.Pipeline(model, devices=1, microbatches=3, loss=F.mse_loss, batchnorm="deferred") as pipe:
            for _ in range(STEPS):
                pipe.step(x, x)
    assert torch.equal(own.get_buffer("mean"), torchs.get_buffer("running_mean"))
    assert torch.equal(own.get_buffer("variance"), torchs.get_buffer("running_var"))


CALL = (0, True)


def looking() -> Unwatched:
    """At a forward in which one layer runs unwatched."""
    made = Unwatched(unknown=True, is_open=True)
    made.learn(CALL, nn.Identity())
    made.begin(torch.device("cpu"), apart=True, allowed=True)
    assert made.runs(CALL)
    return made


def test_what_somebody_else_draws_is_not_put_back() -> None:
    unwatched = looking()
    torch.rand(1)  # in a thread of the user's
    state = torch.get_rng_state()
    assert unwatched.moved()
    unwatched.begin(torch.device("cpu"), apart=True, allowed=True)
    assert not unwatched.runs(CALL)
    assert not unwatched.moved()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_that_another_stage_puts_back_hides_no_draws() -> None:
    state = torch.get_rng_state()
    one, other = looking(), looking()
    torch.rand(1)  # in both
    assert one.moved()
    one.begin(torch.device("cpu"), apart=True, allowed=True)
    one.drew(CALL)
    assert not one.moved()
    assert torch.equal(torch.get_rng_state(), state)
    assert other.moved()


class BesidesALoader(nn.Module):
    """In whose later forwards a loader draws, in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.forwards, self.draws = nn.Linear(4, 4), 0, 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        if self.forwards > LATE:
            self.draws += 1
            loader = threading.Thread(target=torch.rand, args=(1,))
            loader.start()
            loader.join()
        return self.linear(x)


def test_a_loader_draws_what_it_would_draw_without_a_stream() -> None:
    layer, x = BesidesALoader(), torch.randn(6, 4)
    model, state = nn.Sequential(nn.Linear(4, 4), layer), torch.get_rng_state()
    with (
        gapless.Pipeline(model, devices=2, schedule="pipedream", microbatches=1, loss=F.mse_loss) as pipe,
        pipe.stream(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)) as stream,
    ):
        assert len(list(stream.run([(x, x)] * 8))) == 8
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(layer.draws):
        torch.rand(1)
    assert layer.draws == 8 - LATE
    assert torch.equal(torch.get_rng_state(), drawn)
