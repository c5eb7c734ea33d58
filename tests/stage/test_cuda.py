"""On an NVIDIA GPU: the same bits as the plain loop on that GPU, and no host synchronisation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gapless.stage.stage import Stage
from gapless.zoo.gpt import gpt, next_token_loss
from tests.stage.exactness import assert_same_as_plain, make_stages, mean_square
from tests.stage.split.test_deferred import Scaled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def autocast() -> Any:
    return torch.autocast("cuda", torch.bfloat16)


@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_gpt(context: Callable[[], Any], dropout: float) -> None:
    model = gpt(vocab=65, width=64, depth=2, heads=4, context=32, dropout=dropout).cuda()
    ids = torch.randint(65, (6, 32), device="cuda")
    assert_same_as_plain(list(model), ids, ids.roll(-1, 1), loss=next_token_loss, cuts=(1, 3), context=context)


@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast])
def test_linear_layers_convolutions_attention_and_a_function_that_defers(context: Callable[[], Any]) -> None:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, need_weights=False)[0]

    layers = [
        nn.Conv1d(16, 16, 3, padding=1),
        nn.Linear(32, 32),
        nn.ReLU(inplace=True),
        nn.LayerNorm(32),
        Attend(),
        nn.Dropout(0.3),
        Scaled(32),
        nn.Linear(32, 32, bias=False),
    ]
    layers = [layer.cuda() for layer in layers]
    assert_same_as_plain(layers, torch.randn(6, 16, 32, device="cuda"), cuts=(2, 4), context=context)
    assert_same_as_plain(layers[1:], torch.randn(6, 32, device="cuda").unsqueeze(1), cuts=(2, 4), context=context)


def test_a_custom_function_defers_from_the_threads_of_autograd() -> None:
    layer = Scaled(8).cuda()
    stage = Stage([layer], first_layer=0, split=True, loss=mean_square)
    stage.forward(0, torch.randn(4, 8, device="cuda"), step=0)
    stage.backward_input(0, None)
    assert layer.w.grad is None
    stage.backward_weight(0)
    assert layer.w.grad is not None


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_a_step_never_waits_for_the_gpu(remat: str) -> None:
    model = gpt(vocab=65, width=64, depth=2, heads=4, context=32, dropout=0.2).cuda()
    stages = make_stages(list(model), (2,), next_token_loss, split=True, remat=remat)
    ids = torch.randint(65, (2, 32), device="cuda")
    target = ids.roll(-1, 1)
    for step in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            value = stages[0].forward(0, ids, step=step)
            stages[1].forward(0, value, step=step, target=target)
            stages[0].backward_input(0, stages[1].backward_input(0, None))
            for stage in stages:
                stage.backward_weight(0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
