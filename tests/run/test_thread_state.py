"""What the caller has entered holds in the threads that work for it, or is refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gapless


class Rounding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


def hooks() -> AbstractContextManager[None]:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("mode", "named"), [(Rounding, "Rounding is"), (Counting, "Counting is"), (hooks, "saved-tensor hooks are")]
)
def test_modes_around_a_step_are_refused(mode: Callable[[], Any], named: str, devices: int) -> None:
    x = torch.randn(4, 4)
    with gapless.Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], devices=devices, loss=F.mse_loss) as pipe:
        with mode(), pytest.raises(gapless.GaplessError, match=f"{named} entered around this") as caught:
            pipe.step(x, x)
        assert caught.value.guard == "modes of the caller"
        pipe.step(x, x)
        with hooks(), torch.device("cpu"):
            pipe.evaluate(x, x)  # which saves nothing


def test_a_pipeline_in_a_layer_of_another_one_has_its_modes() -> None:
    inner = gapless.Pipeline([nn.Linear(4, 4), nn.Dropout(0.5)], devices=2, loss=F.mse_loss)

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = inner.step(x.detach(), x.detach()).loss
            assert loss is not None
            return F.dropout(x) * loss

    x = torch.randn(4, 4)
    with inner, gapless.Pipeline([nn.Linear(4, 4), Calls()], devices=2, schedule="zb-h1", loss=F.mse_loss) as pipe:
        pipe.step(x, x)
