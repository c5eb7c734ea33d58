"""What torch keeps once for all threads: a layer that touches it runs alone, or is refused in its first call."""

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

import gapless
from gapless.errors import ConfigError
from gapless.stage.draws import Draws
from gapless.stage.stored import Stored
from tests.pipelines import Do, assert_same_gradients

Context = Callable[[], AbstractContextManager[Any]]


def setting(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Context:
    @contextlib.contextmanager
    def context() -> Any:
        before = get()
        put(value)
        try:
            yield
        finally:
            put(before)

    return context


# Everything of torch that a layer may set and that other threads then have too.
EVERYBODYS: dict[str, Context] = {
    "default_dtype": setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "fp32_precision|matmul_precision": setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "sdp_use": lambda: sdpa_kernel(SDPBackend.MATH),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "check_sparse": torch.sparse.check_sparse_tensor_invariants,
    "num_threads": setting(torch.get_num_threads, torch.set_num_threads, 1),
    "flush_denormal": setting(lambda: False, torch.set_flush_denormal, False),
    "fastpath": setting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    "early_stop": lambda: set_checkpoint_early_stop(False),
    "debug_enabled": lambda: set_checkpoint_debug_enabled(False),
    "parametrize.cached": parametrize.cached,
}
# What torch keeps for each thread, and a stage may set as it likes.
OF_A_THREAD: dict[str, Context] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", enabled=False),
    "default device": lambda: torch.device("cpu"),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
}


class Sets(nn.Module):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.linear, self.context = nn.Linear(6, 6), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            aside = torch.zeros(6, dtype=x.dtype)
        y: Tensor = torch.tanh(self.linear(x)) + aside
        return y


def layers_with(make: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 6), make())


def assert_exact(model: nn.Sequential, *, devices: int, steps: int = 2, microbatches: int = 4) -> None:
    reference = copy.deepcopy(model)
    with gapless.Pipeline(
        model, devices=devices, microbatches=microbatches, loss=F.mse_loss, intra_op_threads=torch.get_num_threads()
    ) as pipe:
        for step in range(steps):
            x, y = torch.randn(2 * microbatches, 6), torch.randn(2 * microbatches, 6)
            pipe.step(x, y)
            for part, target in zip(x.split(2), y.split(2), strict=True):
                (F.mse_loss(reference(part), target) / microbatches).backward()
            assert_same_gradients(model, reference, f"step {step}")


@pytest.mark.parametrize("name", EVERYBODYS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_layer_that_sets_what_all_threads_share_is_refused(name: str) -> None:
    """It held in whatever another stage computed at that moment."""
    model = layers_with(lambda: Sets(EVERYBODYS[name]))
    with (
        gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=rf"calls \w*({name}).* once for all threads.*: set it for the whole model"),
    ):
        pipe.step(torch.randn(8, 6), torch.randn(8, 6))


@pytest.mark.parametrize("name", ["default_dtype", "sdp_use", "parametrize.cached"])
def test_where_one_thread_computes_a_layer_may_set_it(name: str) -> None:
    assert_exact(layers_with(lambda: Sets(EVERYBODYS[name])), devices=1)


@pytest.mark.parametrize("name", OF_A_THREAD)
def test_what_torch_keeps_for_each_thread_a_layer_may_set(name: str) -> None:
    assert_exact(layers_with(lambda: Sets(OF_A_THREAD[name])), devices=2)


def along(linear: nn.Module, x: Tensor) -> Tensor:
    y, slope = torch.func.jvp(lambda x: torch.tanh(linear(x)), (x,), (torch.ones_like(x),))
    return y + slope  # type: ignore[no-any-return]


def test_layers_with_forward_derivatives_run_one_at_a_time() -> None:
    """Torch counts their levels once for all threads: now and then a step failed on one that was not its own."""
    assert_exact(layers_with(lambda: Do(along, nn.Linear(6, 6))), devices=2, steps=4, microbatches=16)


def test_parametrizations_without_a_cache_are_exact() -> None:
    assert_exact(layers_with(lambda: parametrizations.weight_norm(nn.Linear(6, 6))), devices=2)


def noisy(generator: torch.Generator) -> nn.Module:
    return Do(lambda linear, x: linear(x) + torch.randn(x.shape, generator=generator), nn.Linear(6, 6))


@pytest.mark.parametrize("begins", [0, 3])
def test_one_generator_for_layers_of_several_stages_is_refused_when_both_have_drawn(begins: int) -> None:
    """Which of the stages drew first depended on the clock."""
    generator, step = torch.Generator().manual_seed(1), -1

    def later(linear: nn.Module, x: Tensor) -> Any:
        return linear(x) + (torch.randn(x.shape, generator=generator) if step >= begins else 0)

    model = nn.Sequential(noisy(generator), nn.Linear(6, 6), Do(later, nn.Linear(6, 6)), nn.Linear(6, 6))
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        for step in range(begins):  # noqa: B007
            pipe.step(torch.randn(8, 6), torch.randn(8, 6))
        step = begins
        with pytest.raises(gapless.GaplessError, match="layers of several stages draw from one torch"):
            pipe.step(torch.randn(8, 6), torch.randn(8, 6))


def test_a_generator_for_each_stage_draws_as_in_the_plain_loop() -> None:
    generators = [torch.Generator().manual_seed(number) for number in range(4)]
    model = nn.Sequential(*(noisy(generators[number // 2]) for number in range(4)))
    plain = nn.Sequential(*(noisy(generators[2 + number // 2]) for number in range(4)))
    plain.load_state_dict(model.state_dict())
    for number in range(2):
        generators[2 + number].manual_seed(number)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1) as pipe:
        x, y = torch.randn(8, 6), torch.randn(8, 6)
        pipe.step(x, y)
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.mse_loss(plain(part), target) / 4).backward()
    assert_same_gradients(model, plain, "gradients")


def test_a_generator_that_layers_of_another_process_hold_too_is_refused() -> None:
    """Each process drew from a copy of its own, which began as the others did."""
    there, generator = nn.Linear(6, 6), torch.Generator()
    there.generator = generator  # type: ignore[assignment]
    draws = Draws(0, Stored(nn.Sequential(there), elsewhere=[there]).generators)
    with draws.of_its_own(torch.Generator()):
        pass
    with pytest.raises(gapless.GaplessError, match="one torch"), draws.of_its_own(generator):
        pass
