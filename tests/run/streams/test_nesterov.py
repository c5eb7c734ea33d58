"""The optimizer against the formulas of arXiv 2505.01099, written out in plain floats."""

from collections import deque
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.run.streams.nesterov import DelayedNesterov


@pytest.fixture
def double() -> Iterator[None]:
    """torch keeps the product of all momenta in the default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def weight(value: float = 0.3, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def nadam(value: float, grads: list[float], lr: float, c: float, decay: float) -> list[float]:
    """Scalar by scalar: the look-ahead form with a warmed up momentum, bias corrections and decoupled decay."""
    m, v, product, values = 0.0, 0.0, 1.0, []
    for t, grad in enumerate(grads, start=1):
        momentum, following = (c * (1 - 0.96 ** (each * 4e-3) / 2) for each in (t, t + 1))
        product *= momentum
        m = c * m + (1 - c) * grad
        v = 0.999 * v + (1 - 0.999) * grad**2
        look_ahead = following * m / (1 - product * following) + (1 - momentum) * grad / (1 - product)
        value = value - lr * decay * value - lr * look_ahead / ((v / (1 - 0.999**t)) ** 0.5 + 1e-8)
        values.append(value)
    return values


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("c", "decay"), [(0.99, 0.01), (0.9, 0.0)])
def test_updates_are_those_of_the_formulas(c: float, decay: float) -> None:
    grads = [0.5, -1.25, 0.75, 2.0, -0.125] * 6
    parameter = weight()
    optimizer = DelayedNesterov([parameter], lr=0.01, betas=(c, 0.999), weight_decay=decay)
    for grad, expected in zip(grads, nadam(0.3, grads, 0.01, c, decay), strict=True):
        parameter.grad = torch.full_like(parameter, grad)
        optimizer.step()
        assert parameter.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_without_adam_s_scale_it_is_equation_10_of_the_paper(delay: int) -> None:
    """The curve of weights w under d = c (w_t - w_{t-1}), w + d - lr (1 - c) g, gradients `delay` updates old. What the
    optimizer holds is w + d. An eps so large that it is the whole denominator takes the scale away, a state that is old
    the corrections of its bias.
    """

    def gradient(at: float) -> float:
        return 3.0 * at + 0.5 * at**3

    c, lr, eps = 0.95, 0.05, 1e12
    parameter = weight(1.0)
    optimizer = DelayedNesterov([parameter], lr=lr * eps, betas=(c, 0.999), eps=eps, weight_decay=0.0)
    zeros = torch.zeros_like(parameter)
    optimizer.state[parameter] = {
        "step": torch.tensor(1e9),
        "mu_product": torch.tensor(0.0),
        "exp_avg": zeros.clone(),
        "exp_avg_sq": zeros.clone(),
    }
    before = now = 1.0
    points = deque([now] * (delay + 1), maxlen=delay + 1)
    held = deque([parameter.item()] * (delay + 1), maxlen=delay + 1)
    for _ in range(60):
        look_ahead = c * (now - before)
        points.append(now + look_ahead)
        before, now = now, now + look_ahead - lr * (1 - c) * gradient(points[0])
        held.append(parameter.item())
        parameter.grad = torch.full_like(parameter, gradient(held[0]))
        optimizer.step()
        assert parameter.item() == pytest.approx(now + c * (now - before), rel=1e-9, abs=1e-9)
    assert abs(now) < 0.9  # it went somewhere


def test_it_is_set_up_as_the_paper_s_authors_do() -> None:
    group = DelayedNesterov([weight()]).param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.99, 0.999), 1e-8, 0.01)
    assert (group["momentum_decay"], group["decoupled_weight_decay"]) == (4e-3, True)


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    before = [each.detach().clone() for each in model[0].parameters()]
    with (
        gapless.Pipeline(model, devices=2, schedule="pipedream", microbatches=1, loss=F.mse_loss) as pipe,
        pytest.raises(gapless.GaplessError) as caught,
        pipe.stream(correction="nesterov", lr=0.01) as stream,
    ):
        list(stream.run([(torch.tensor([1, 3]), torch.ones(2, 1))]))
    assert str(caught.value) == "a gradient at stage 0 is sparse, which a stream can't take: use sparse=False"
    assert all(map(torch.equal, model[0].parameters(), before))
