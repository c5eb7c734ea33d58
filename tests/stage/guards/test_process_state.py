"""What torch keeps once for all threads: a layer that touches it runs alone, or is refused, whenever it begins to."""

import contextlib
import inspect
import itertools
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_debug_enabled, set_checkpoint_early_stop

import gapless
from gapless.errors import ConfigError
from gapless.stage.guards.process_state import watch_torch
from gapless.stage.guards.stored_tensors import Stored
from gapless.stage.random.draws import Draws
from tests.pipelines import Do
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

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
    "num_threads": setting(torch.get_num_threads, lambda count: torch.set_num_threads(count), 1),
    "flush_denormal": setting(lambda: False, lambda flush: torch.set_flush_denormal(flush), False),
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


def setter(context: Context) -> nn.Module:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        with context():
            aside = torch.zeros(6, dtype=x.dtype)
        return torch.tanh(linear(x)) + aside

    return Do(forward, nn.Linear(6, 6))


def assert_exact(make: Callable[[], nn.Module], **options: Any) -> None:
    assert_same_as_loop(lambda clock: ([linear(), make(), linear(), make()], F.mse_loss), **options)


@pytest.mark.parametrize("name", ["default_dtype", "sdp_use", "parametrize.cached"])
def test_where_one_thread_computes_a_layer_may_set_it(name: str) -> None:
    assert_exact(lambda: setter(EVERYBODYS[name]), devices=1)


@pytest.mark.parametrize("name", OF_A_THREAD)
def test_what_torch_keeps_for_each_thread_a_layer_may_set(name: str) -> None:
    assert_exact(lambda: setter(OF_A_THREAD[name]))


def along(linear: nn.Module, x: Tensor) -> Tensor:
    y, slope = torch.func.jvp(lambda x: torch.tanh(linear(x)), (x,), (torch.ones_like(x),))
    return y + slope  # type: ignore[no-any-return]


def test_layers_with_forward_derivatives_run_one_at_a_time() -> None:
    """Torch counts their levels once for all threads: now and then a step failed on one that was not its own."""
    assert_exact(lambda: Do(along, linear()), steps=4, microbatches=16)


When = Callable[[int, int], bool]  # a step and a microbatch
WHEN: dict[str, When] = {
    "from a step on": lambda step, _: step >= 3,
    "in one microbatch": lambda _, microbatch: microbatch == 2,
    "now and then": lambda step, microbatch: step % 2 == 1 and microbatch % 2 == 1,
}
Way = Callable[[nn.Module, Tensor], Tensor]


class Late(nn.Module):
    """Does something, but not always. The first column is the number of the microbatch, and goes through."""

    def __init__(self, clock: Clock, way: Way, when: When) -> None:
        super().__init__()
        self.linear, self.clock, self.way, self.when = linear(), clock, way, when

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x, 0.1)
        h = self.way(self.linear, h) if self.when(self.clock.step, int(x[0, 0])) else self.linear(h)
        h = torch.tanh(h) + 0.1 * torch.rand_like(h)
        return torch.cat((x[:, :1], h[:, 1:]), 1)


def forks(linear: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.rand_like(x)
    return linear(x * noise) + torch.rand_like(x)  # type: ignore[no-any-return]


def repeats(linear: nn.Module, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    return linear(x * first) + torch.rand_like(x)  # type: ignore[no-any-return]


def repeats_directly(linear: nn.Module, x: Tensor) -> Tensor:
    state = torch.default_generator.get_state()
    first = torch.rand_like(x)
    torch.default_generator.set_state(state)
    return linear(x * first) + torch.rand_like(x)  # type: ignore[no-any-return]


def asks_for_the_seed(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * (torch.initial_seed() % 97 / 97)  # type: ignore[no-any-return]


def seeds(linear: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return linear(x) * torch.rand_like(x)  # type: ignore[no-any-return]


def names_the_default(linear: nn.Module, x: Tensor) -> Tensor:
    return linear(x) * torch.rand(x.shape, generator=torch.default_generator)  # type: ignore[no-any-return]


def dual(linear: nn.Module, x: Tensor) -> Tensor:
    with fwAD.dual_level():
        made = fwAD.unpack_dual(torch.tanh(linear(fwAD.make_dual(x, torch.ones_like(x)))))
        return made.primal + made.tangent  # type: ignore[no-any-return]


def assert_trained_alike(make: Callable[[Clock], nn.Module], **options: Any) -> None:
    assert_same_as_loop(lambda clock: ([make(clock) for _ in range(4)], F.mse_loss), numbered=True, **options)


WAYS = [forks, repeats, repeats_directly, asks_for_the_seed, seeds, names_the_default, along, dual]


@pytest.mark.parametrize(("way", "when"), zip(WAYS, itertools.cycle(WHEN), strict=False))
def test_a_layer_may_begin_later_to_use_generators_or_forward_derivatives(way: Any, when: str) -> None:
    """Only the first call was looked at: draws differed from the plain loop, and levels met those of other threads."""
    for schedule in ("1f1b", "zb-h1"):
        assert_trained_alike(lambda clock: Late(clock, way, WHEN[when]), schedule=schedule)


ELSEWHERE = ({"devices": 1}, {"schedule": "zb-h1", "remat": "stage"}, {"schedule": "1f1b", "remat": "layer"})


@pytest.mark.parametrize(("way", "options"), zip(WAYS, itertools.cycle(ELSEWHERE), strict=False))
def test_so_it_may_where_one_thread_computes_and_where_the_stage_is_recomputed(way: Any, options: Any) -> None:
    assert_trained_alike(lambda clock: Late(clock, way, WHEN["now and then"]), **options)


@pytest.mark.parametrize("name", EVERYBODYS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_a_layer_that_sets_what_all_threads_share_is_refused(name: str) -> None:
    """It held in whatever another stage computed at that moment."""

    def sets(linear: nn.Module, x: Tensor) -> Tensor:
        with EVERYBODYS[name]():
            return linear(x)  # type: ignore[no-any-return]

    for begins in (0, 3):
        clocks: list[Clock] = []

        def make(clock: Clock, begins: int = begins, clocks: list[Clock] = clocks) -> nn.Module:
            clocks.append(clock)
            return Late(clock, sets, lambda *now: now == (begins, 2))

        told = rf"calls \w*({name}).* in its forward.* once for all threads.*: set it for the whole model"
        with pytest.raises(ConfigError, match=told):
            assert_trained_alike(make)
        assert clocks[-1].step == begins


def test_a_backward_that_sets_what_all_threads_share_is_refused() -> None:
    def hooked(linear: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = linear(x)
        made.register_hook(lambda grad: torch.set_default_dtype(torch.float32))
        return made

    with pytest.raises(ConfigError, match="calls set_default_dtype in its backward"):
        assert_trained_alike(lambda clock: Late(clock, hooked, lambda step, _: step == 2))


def test_what_others_do_during_a_step_is_not_a_layers() -> None:
    """Threads of the user's set what they like, and functions of torch are what they were for them."""
    assert pickle.loads(pickle.dumps(torch.set_num_threads)) is torch.set_num_threads
    assert str(inspect.signature(torch.set_rng_state)) == "(new_state: torch.Tensor) -> None"
    done: list[Any] = []

    def others(linear: nn.Module, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: done.append(torch.get_rng_state()))
        thread.start()
        thread.join()
        return linear(x)  # type: ignore[no-any-return]

    assert_trained_alike(lambda clock: Late(clock, others, WHEN["now and then"]), steps=2)
    assert len(done) == 2 * 8  # in the loop, too


def casts(linear: nn.Module, x: Tensor) -> Tensor:
    """Both uses share a cast, unless somebody lets go of it meanwhile."""
    with torch.autocast("cpu", torch.bfloat16):
        first = linear(x)
        time.sleep(0.005)
        return first + linear(x * 0.5)  # type: ignore[no-any-return]


def casts_again(linear: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(casts, linear, x, use_reentrant=False)  # type: ignore[no-any-return]


def runs_again(linear: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(linear, x, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.in_pairs
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("other", [casts, casts_again, runs_again])
@pytest.mark.parametrize("when", ["now and then", "from a step on"])
def test_layers_with_an_autocast_of_their_own_keep_their_casts(other: Any, when: str, schedule: str) -> None:
    """Whoever left an autocast took the casts of all threads away, the checkpoints of other stages too: where one began
    to cast later, and in every backward.
    """
    ways = itertools.cycle([casts, casts, other, other])
    assert_trained_alike(lambda clock: Late(clock, next(ways), WHEN[when]), microbatches=8, schedule=schedule)


def runs_slowly_again() -> nn.Module:
    """Draws nothing."""

    def slowly(linear: nn.Module, x: Tensor) -> Any:
        time.sleep(0.005)
        return linear(x)

    return Do(lambda linear, x: checkpoint(slowly, linear, x, use_reentrant=False), nn.Linear(6, 6))


def draws_slowly(linear: nn.Module, x: Tensor) -> Tensor:
    torch.get_rng_state()
    time.sleep(0.005)
    return linear(x) * torch.rand_like(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_checkpoint_that_draws_nothing_leaves_generators_to_other_stages(schedule: str) -> None:
    """Its backward put them where they had stood, while a layer of another stage drew from them."""
    number = itertools.count()

    def make(clock: Clock) -> nn.Module:
        return runs_slowly_again() if next(number) % 4 > 1 else Late(clock, draws_slowly, lambda *_: True)

    assert_trained_alike(make, microbatches=8, schedule=schedule)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_draws_nothing_does_not_ask_for_the_state_of_the_generator(reentrant: bool) -> None:
    """Two threads that ask for it at once can wait for each other for ever."""
    asked, default = list[str](), torch.default_generator

    def note(frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is default and frame.f_back is not None:
            asked.append(frame.f_globals["__name__"])

    def forward(linear: nn.Module, x: Tensor) -> Any:
        return checkpoint(linear, x, use_reentrant=reentrant)

    layers = [Do(forward, nn.Linear(6, 6)) for _ in range(2)]
    before = threading.getprofile()
    threading.setprofile(note)
    try:
        with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
            for _ in range(2):
                asked.clear()
                pipe.step(torch.randn(8, 6, requires_grad=True), torch.randn(8, 6))
    finally:
        threading.setprofile(before)
    assert "torch.random" not in asked


def test_parametrizations_without_a_cache_are_exact() -> None:
    assert_exact(lambda: parametrizations.weight_norm(linear()))


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
    def make(clock: Clock) -> Made:
        generators = [torch.Generator().manual_seed(number) for number in range(2)]
        return [noisy(generators[number // 2]) for number in range(4)], F.mse_loss

    assert_same_as_loop(make)


def test_a_generator_that_layers_of_another_process_hold_too_is_refused() -> None:
    """Each process drew from a copy of its own, which began as the others did."""
    there, generator = nn.Linear(6, 6), torch.Generator()
    there.generator = generator  # type: ignore[assignment]
    draws = Draws(0, Stored(nn.Sequential(there), elsewhere={0: there}).generators)
    with draws.of_its_own(torch.Generator()):
        pass
    with pytest.raises(gapless.GaplessError, match="one torch"), draws.of_its_own(generator):
        pass


def test_torch_names_what_it_has_deprecated_without_a_warning() -> None:
    """Each first torch.compile warned of has_cuda and three others: torch silences only what comes from its modules."""
    watch_torch()
    named: Any = torch.overrides.get_ignored_functions
    named.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert named()
