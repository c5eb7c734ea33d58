"""Parameters that several stages use: one in the optimizer, its gradient the plain loop's to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from tests.model.training import WAYS, assert_exact

VOCAB, WIDTH = 9, 6


def token_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def ids(samples: int = 6) -> Tensor:
    return torch.randint(VOCAB, (samples, 4))


def sequence() -> Any:
    """An embedding tied to the head, and one norm used by every second layer."""
    torch.manual_seed(0)
    embedding, norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
    head = nn.Linear(WIDTH, VOCAB, bias=False)
    head.weight = embedding.weight
    body = [part for _ in range(4) for part in (norm, nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(embedding, *body, norm, head)


@pytest.mark.parametrize(("devices", "schedule", "remat"), [*WAYS, (2, "zb-h1", "layer"), (3, "gpipe", "layer")])
def test_tied_layers_of_a_sequence_are_exact(devices: int, schedule: str, remat: str) -> None:
    batches = [(ids(), ids()), (ids(7), ids(7)), (ids(), ids())]
    assert_exact(sequence(), batches, loss=token_loss, devices=devices, schedule=schedule, remat=remat)


def test_one_parameter_is_in_the_optimizer() -> None:
    with gapless.Pipeline(sequence(), devices=2, microbatches=2, loss=token_loss) as pipe:
        names = [name for name, _ in pipe.named_parameters()]
        assert "0.weight" in names
        assert "14.weight" not in names
        assert "14.weight" in pipe.state_dict()


def test_sums_that_meet_once_differ_in_the_last_bits_only() -> None:
    exact, summed = sequence(), sequence()
    inputs, target = ids(), ids()
    for model, tied in ((exact, "exact"), (summed, "summed")):
        options: dict[str, Any] = {"devices": 3, "microbatches": 3, "loss": token_loss, "tied": tied}
        with gapless.Pipeline(model, **options) as pipe:
            for _ in range(2):
                pipe.step(inputs, target)
    for a, b in zip(exact.parameters(), summed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert torch.equal(exact[2].weight.grad, summed[2].weight.grad)  # what is not tied has the same bits


def test_a_frozen_tied_parameter_gets_no_gradient() -> None:
    model = sequence()
    model[0].requires_grad_(False)
    assert_exact(model, [(ids(), ids())], loss=token_loss)
    assert model[0].weight.grad is None


def test_a_parameter_may_be_frozen_and_thawed_between_steps() -> None:
    model = sequence()
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=token_loss) as pipe:
        for needs in (True, False, True):
            model[0].requires_grad_(needs)
            plain[0].requires_grad_(needs)
            inputs, target = ids(), ids()
            pipe.step(inputs, target)
            gapless.plain_step(plain, inputs, target, loss=token_loss, microbatches=2)
            assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


def test_a_step_that_failed_leaves_nothing_behind() -> None:
    model = sequence()
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=3, loss=token_loss) as pipe:
        with pytest.raises(ValueError, match="batch_size"):
            pipe.step(ids(), torch.randint(VOCAB, (6, 3)))
        pipe.zero_grad()
        inputs, target = ids(), ids()
        pipe.step(inputs, target)
        gapless.plain_step(plain, inputs, target, loss=token_loss, microbatches=3)
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


def test_a_hook_on_a_tied_parameter_would_see_parts_and_is_refused() -> None:
    model = sequence()
    handle = model[0].weight.register_hook(lambda grad: grad * 2)
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=token_loss) as pipe:
        with pytest.raises(ConfigError, match=r"0\.weight is shared by several stages and has a hook"):
            pipe.step(ids(), ids())
        handle.remove()
        pipe.step(ids(), ids())


def test_an_unknown_way_to_tie_is_refused() -> None:
    with pytest.raises(ConfigError, match="tied is 'sum', but it must be 'exact' or 'summed'"):
        gapless.Pipeline(sequence(), devices=2, microbatches=2, loss=token_loss, tied="sum")  # type: ignore[arg-type]


class Scaled(nn.Module):
    """Has a tensor that learns where no module looks for parameters."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.lin, self.hidden = nn.Linear(WIDTH, WIDTH), [tensor]

    def forward(self, x: Tensor) -> Any:
        inner = x.detach().requires_grad_()  # a leaf of this microbatch alone
        return self.lin(x + 0 * inner) * self.hidden[0]


def scaled(users: range) -> tuple[Tensor, nn.Sequential]:
    torch.manual_seed(0)
    tensor = torch.ones(WIDTH, requires_grad=True)
    other = [torch.ones(WIDTH, requires_grad=True) for _ in range(4)]
    return tensor, nn.Sequential(*(Scaled(tensor if n in users else other[n]) for n in range(4)))


@pytest.mark.parametrize(("users", "remat"), [(range(4), "none"), (range(1, 3), "stage"), (range(2), "layer")])
def test_a_tensor_that_learns_in_two_places_and_is_no_parameter_is_refused(users: range, remat: Any) -> None:
    _, model = scaled(users)
    with (
        gapless.Pipeline(model, devices=2, microbatches=3, loss=F.mse_loss, remat=remat) as pipe,
        pytest.raises(ConfigError, match=r"make it an nn\.Parameter of a module"),
    ):
        pipe.step(torch.randn(6, WIDTH), torch.randn(6, WIDTH))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_tensor_that_learns_in_one_stage_need_not_be_a_parameter(schedule: str) -> None:
    (ours, model), (theirs, plain) = scaled(range(2)), scaled(range(2))
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    options: dict[str, Any] = {"devices": 2, "microbatches": 3, "loss": F.mse_loss, "intra_op_threads": 1}
    with gapless.Pipeline(model, schedule=schedule, **options) as pipe:
        pipe.step(x, y)
        pipe.step(x, y)
    for xs, ys in [*zip(x.chunk(3), y.chunk(3), strict=True)] * 2:
        (F.mse_loss(plain(xs), ys) * (2 / 6)).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
