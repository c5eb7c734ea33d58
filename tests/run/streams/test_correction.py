"""Formulas against references in plain floats. Their numbers have few bits where torch may multiply and add at once, so
the bits are those of the formulas on every machine.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from gapless.errors import ConfigError
from gapless.run.streams.correction import check_predictable, lr_by_delay, predictions, scaled_lr

GRADS = [0.5, -1.25, 0.75, 2.0]


def weight(value: float = 0.3, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def after(parameter: nn.Parameter, optimizer: Optimizer, grads: list[float] = GRADS) -> Optimizer:
    for grad in grads:
        parameter.grad = torch.full_like(parameter, grad)
        optimizer.step()
    return optimizer


def moving(parameter: nn.Parameter) -> list[Optimizer]:
    """Every optimizer that is known, in the forms in which its state comes."""
    return [
        SGD([parameter], lr=0.1, momentum=0.9),
        SGD([parameter], lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        SGD([parameter], lr=torch.tensor(0.1), momentum=0.9, dampening=0.25, weight_decay=0.1, maximize=True),
        SGD([parameter], lr=0.1, momentum=0.9, fused=True),
        Adam([parameter], lr=0.1, amsgrad=True, weight_decay=0.1),
        Adam([parameter], lr=torch.tensor([0.1]), foreach=False),
        Adam([parameter], lr=0.1, fused=True),
        AdamW([parameter], lr=0.1, maximize=True, foreach=True),
    ]


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.5}, {"maximize": True}, {"lr": 0.125}])
def test_sgd_is_predicted_along_its_momentum_buffer(options: dict[str, Any], updates: int) -> None:
    parameter = weight()
    settings: dict[str, Any] = {"lr": 0.25, "momentum": 0.9, **options}
    optimizer = after(parameter, SGD([parameter], **settings))
    sign = -1.0 if options.get("maximize") else 1.0
    buffer = sign * GRADS[0]
    for grad in GRADS[1:]:
        buffer = 0.9 * buffer + (1 - options.get("dampening", 0.0)) * sign * grad
    expected = parameter.item() - (updates * settings["lr"]) * buffer
    assert predictions(optimizer, updates)[parameter].tolist() == [expected]


@pytest.mark.in_pairs
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_adam_is_predicted_along_its_corrected_direction(
    kind: type[Adam], options: dict[str, Any], updates: int
) -> None:
    parameter = weight()
    optimizer = after(parameter, kind([parameter], lr=0.01, betas=(0.5, 0.75), eps=1e-3, **options), [*GRADS, 0.25])
    m = v = largest = 0.0
    for grad in [*GRADS, 0.25]:
        m = 0.5 * m + 0.5 * (-grad if options.get("maximize") else grad)
        v = 0.75 * v + 0.25 * grad * grad
        largest = max(largest, v)
    if options.get("amsgrad"):
        assert largest > v
        v = largest
    steps = len(GRADS) + 1
    direction = m / (1 - 0.5**steps) / (math.sqrt(v) / (1 - 0.75**steps) ** 0.5 + 1e-3)
    assert predictions(optimizer, updates)[parameter].tolist() == [parameter.item() - (updates * 0.01) * direction]


def test_a_complex_parameter_is_predicted_as_its_two_parts() -> None:
    values = torch.tensor([0.5 - 1.5j, 2.0 + 0.25j])
    whole, parts = nn.Parameter(values.clone()), nn.Parameter(torch.view_as_real(values).clone())
    first, second = Adam([whole], lr=0.1), Adam([parts], lr=0.1)
    for scale in (1.0, -0.5, 3.0):
        whole.grad = values * scale
        parts.grad = torch.view_as_real(values) * scale
        first.step()
        second.step()
    assert torch.equal(torch.view_as_real(predictions(first, 2)[whole]), predictions(second, 2)[parts])


@pytest.mark.parametrize(("form", "dtype"), zip(range(8), [torch.float32, torch.bfloat16] * 4, strict=True))
def test_a_prediction_changes_nothing(form: int, dtype: torch.dtype) -> None:
    parameter = weight(dtype=dtype)
    optimizer = after(parameter, moving(parameter)[form])
    before, value = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    ahead = predictions(optimizer, 3)[parameter]
    assert not torch.equal(ahead, value)
    assert (ahead.dtype, ahead.shape, ahead.requires_grad) == (dtype, value.shape, False)
    assert torch.equal(parameter, value)
    now = optimizer.state_dict()
    torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)
    assert now["param_groups"] == before["param_groups"]


@pytest.mark.parametrize("form", range(8))
def test_before_the_first_update_there_is_no_prediction(form: int) -> None:
    parameter = weight()
    optimizer = moving(parameter)[form]
    assert predictions(optimizer, 3) == {}
    assert len(optimizer.state) == 0  # it is a defaultdict: to look is to add


def test_a_momentum_buffer_that_is_saved_as_none_is_no_direction() -> None:
    """As files of older versions of torch have it."""
    parameter = weight()
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = None
    assert predictions(optimizer, 3) == {}


def test_each_parameter_has_the_rate_of_its_own_group_and_frozen_ones_stay() -> None:
    slow, fast, frozen = weight(), weight(), weight()
    groups: list[dict[str, Any]] = [{"params": [slow, frozen], "lr": 0.25}, {"params": [fast], "lr": 0.5}]
    optimizer = SGD(groups, momentum=0.5)
    slow.grad, fast.grad = torch.ones_like(slow), torch.ones_like(fast)
    optimizer.step()
    ahead = predictions(optimizer, 2)
    assert set(ahead) == {slow, fast}
    assert [ahead[slow].item(), ahead[fast].item()] == [slow.item() - 0.5, fast.item() - 1.0]


def test_a_rate_that_is_a_tensor_keeps_the_type_of_a_scalar_parameter() -> None:
    parameter = nn.Parameter(torch.tensor(0.5))
    lr = torch.tensor([0.125], dtype=torch.float64)
    optimizer = after(parameter, Adam([parameter], lr=lr))
    ahead = predictions(optimizer, 2)[parameter]
    assert (ahead.dtype, ahead.shape) == (torch.float32, ())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["capturable", "fused"])
def test_a_state_on_a_gpu_is_not_waited_for(kind: str) -> None:
    here, there = weight(), nn.Parameter(torch.tensor([0.3], dtype=torch.float64, device="cuda"))
    plain = after(here, Adam([here], lr=0.01))
    lr = torch.tensor(0.01, device="cuda")
    on_gpu = after(there, Adam([there], lr=lr, capturable=kind == "capturable", fused=kind == "fused"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead = predictions(on_gpu, 3)[there]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(ahead.cpu(), predictions(plain, 3)[here], rtol=1e-6, atol=0)


def test_sgd_without_momentum_is_refused_by_its_group() -> None:
    groups: list[dict[str, Any]] = [{"params": [weight()], "momentum": 0.9}, {"params": [weight()]}]
    optimizer = SGD(groups, lr=0.1)
    with pytest.raises(ConfigError) as caught:
        check_predictable(optimizer)
    assert str(caught.value) == (
        "correction='spectrain' predicts weights from the optimizer's momentum, but SGD has momentum=0 in group 1: "
        "pass momentum=0.9 or so, or leave the correction out"
    )


def test_another_optimizer_is_refused_by_name() -> None:
    parameter = weight()
    optimizer = RMSprop([parameter], momentum=0.9)
    for asked in (lambda: check_predictable(optimizer), lambda: predictions(optimizer, 1)):
        with pytest.raises(ConfigError) as caught:
            asked()
        assert str(caught.value) == (
            "correction='spectrain' knows the momentum of SGD, Adam and AdamW, but the optimizer is RMSprop: take one "
            "of these, or leave the correction out"
        )


def test_annealing_over_no_updates_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_by_delay is 0, but it must be a number of updates of at least 1"):
        lr_by_delay(2, 0, 0)


def test_rates_come_back_as_the_same_objects_whatever_happens() -> None:
    lr = torch.tensor(0.5)
    groups: list[dict[str, Any]] = [{"params": [weight()]}, {"params": [weight()], "lr": 0.25}]
    optimizer = SGD(groups, lr=lr)

    def fails() -> None:
        with scaled_lr(optimizer, 0.5):
            assert [float(group["lr"]) for group in optimizer.param_groups] == [0.25, 0.125]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5
    assert optimizer.param_groups[1]["lr"] == 0.25
