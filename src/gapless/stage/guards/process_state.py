"""What torch keeps once for all threads: seen whenever a layer touches it, in whichever call it begins to.

    default generators    asked for a state, seeded    the stage draws from them alone and seeded (`Mode.alone`)
    forward-mode levels   one is entered               the same: no other thread is inside of one
    settings              one is set                   refused, unless one thread computes
    autocast's casts      an autocast casts            one thread at a time, until its outermost autocast is left

The functions of torch that do so are wrapped, once and for good, when the first stage is made: those in C where torch
looks them up, those in Python by their code, so that it does not matter who has imported them. A wrapper asks who runs
layers in this thread. Where nobody does, it passes the call on.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, FunctionType
from typing import Any

import torch
import torch._functorch.eager_transforms as transforms
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.utils import parametrize

from gapless.guards.process_wide import PROCESS_SETTINGS
from gapless.stage.autocast import autocast_is_on, clear_cache, decrement_nesting, increment_nesting
from gapless.stage.random.exclusive import exclusively, is_held
from gapless.stage.split.call_mode import Mode

Function = Callable[..., Any]
_ANY_STATE = torch.Generator().get_state()  # of a generator from which nobody draws
_CHECKPOINT = "torch.utils.checkpoint"
# Who leaves a setting as it was: ourselves, and torch where it compiles a function.
_PUT_BACK = ("gapless.", "torch._dynamo.convert_frame", "torch._functorch._aot_autograd.", "torch._inductor.")
_BETWEEN = frozenset(
    ("torch", "torch.random", "torch.cuda.random", "torch.cuda", "torch.autograd.anomaly_mode", "contextlib", __name__)
)
_GENERATORS = "set_rng_state get_rng_state manual_seed seed initial_seed"
_GENERATORS_ON_GPUS = f"{_GENERATORS} manual_seed_all seed_all"
# What sets something for the whole process.
_SETTERS_IN_C = """_set_default_dtype _set_default_tensor_type
_set_deterministic_algorithms _set_deterministic_fill_uninitialized_memory _set_check_sparse_tensor_invariants
_set_float32_matmul_precision _set_fp32_precision_setter
_set_blas_preferred_backend _set_linalg_preferred_backend _set_cublas_allow_tf32 _set_cublas_allow_fp16_accumulation
_set_cublas_allow_bf16_reduced_precision_reduction _set_cublas_allow_fp16_reduced_precision_reduction
_set_cpu_allow_fp16_reduced_precision_reduction _set_math_sdp_allow_fp16_bf16_reduction
_set_sdp_use_flash _set_sdp_use_mem_efficient _set_sdp_use_math _set_sdp_use_cudnn _set_sdp_use_overrideable
_set_sdp_priority_order _set_cudnn_enabled _set_cudnn_benchmark _set_cudnn_deterministic _set_cudnn_allow_tf32
_set_mkldnn_enabled _set_mkldnn_deterministic _set_onednn_allow_tf32 _set_nnpack_enabled"""
_SETTERS_IN_TORCH = "set_anomaly_enabled set_num_threads set_flush_denormal"
_SETTERS: dict[str, Function] = {
    "set_fastpath_enabled": torch.backends.mha.set_fastpath_enabled,
    "set_checkpoint_early_stop": torch.utils.checkpoint.set_checkpoint_early_stop,
    "set_checkpoint_debug_enabled": torch.utils.checkpoint.set_checkpoint_debug_enabled,
    "parametrize.cached": parametrize.cached,
    "a setter of torch.backends": torch.backends.ContextProp.__set__,
}


class AtWork:
    """Around what a stage runs in this thread: a forward, a backward, or, without a mode, what nobody looks into."""

    def __init__(self, mode: Mode | None, what: str = "") -> None:
        self.mode, self.what = mode, what
        self._before: AtWork | None = None

    def __enter__(self) -> None:
        self._before, here.work = here.work, None if self.mode is None else self

    def __exit__(self, *_: object) -> None:
        here.work = self._before


class _ThisThread(threading.local):
    work: AtWork | None = None
    casts = False  # this thread is in an autocast that casts, and runs no layer
    alone: AbstractContextManager[None] | None = None  # held in the autocast of a layer's own


here = _ThisThread()


class _Casting:
    """How many threads are inside of an autocast of a layer's own: nobody else may let go of casts."""

    count = 0
    lock = threading.Lock()


@functools.cache
def watch_torch() -> None:
    """Wraps torch's functions, once."""
    for place, names in ((torch._C, _SETTERS_IN_C), (torch, _SETTERS_IN_TORCH)):
        for name in filter(functools.partial(hasattr, place), names.split()):
            _wrap(place, name, functools.partial(_refuse_setting, name.lstrip("_")))
    for name, setter in _SETTERS.items():
        _wrap_code(setter, functools.partial(_refuse_setting, name))
    answers: dict[str, Callable[[], Any]] = {"set_rng_state": _set_state}
    for name in _GENERATORS_ON_GPUS.split():
        _wrap_code(getattr(torch.cuda.random, name), answers.get(name, _touch_generators))
    answers["get_rng_state"] = _get_state
    for name in _GENERATORS.split():
        _wrap_code(getattr(torch.random, name), answers.get(name, _touch_generators))
    _wrap_default_generator()
    # From torch 2.15 on a checkpoint goes around the function that it had before.
    before: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
    generator = getattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl", before)
    for checkpoint in (generator, torch.utils.checkpoint.CheckpointFunction.forward):
        _wrap_code(checkpoint, _enter_checkpoint)
    _wrap_code(transforms.jvp_increment_nesting, _enter_level)
    _wrap_code(torch.autograd.forward_ad.enter_dual_level, _enter_level)
    torch.overrides.has_torch_function = _has_own_function
    torch.autocast_increment_nesting = _enter_autocast
    torch.autocast_decrement_nesting = _leave_autocast


def _wrap(place: Any, name: str, first: Callable[[], None]) -> None:
    """A function in C."""
    function = getattr(place, name)

    @functools.wraps(function)
    def instead(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    setattr(place, name, instead)


def _wrap_code(wrapped: Function, first: Callable[[], Any]) -> None:
    """A function in Python, whoever has it already. What `first` returns, if not None, is the answer."""
    function: Any = inspect.unwrap(wrapped)
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__

    def instead(*args: Any, **kwargs: Any) -> Any:
        answer = first()
        return original(*args, **kwargs) if answer is None else answer

    function.__signature__ = inspect.signature(function)
    function.__kwdefaults__ = {"_instead": instead}
    function.__code__ = _stand_in.__code__


def _wrap_default_generator() -> None:
    """`torch.default_generator`, whose methods can't be wrapped: that somebody asks for it is seen."""
    otherwise: Callable[[str], Any] = torch.__getattr__

    deprecated: dict[str, Function] = vars(torch).get("_deprecated_attrs", {})

    def attribute(name: str) -> Any:
        if name in deprecated and _caller().startswith("torch."):  # which silences warnings of its own modules alone
            return deprecated[name]()
        if name != "default_generator":
            return otherwise(name)
        if not _caller().startswith("torch."):  # which names all that it has when it is first asked to compile
            _touch_generators()
        return torch._C.default_generator

    torch.__getattr__ = attribute  # type: ignore[method-assign]
    del torch.default_generator


def _stand_in(*args: Any, _instead: Function, **kwargs: Any) -> Any:
    return _instead(*args, **kwargs)


def _refuse_setting(name: str) -> None:
    work = here.work
    if work is None or work.mode is None or work.mode.one_thread or _caller().startswith(_PUT_BACK):
        return
    raise PROCESS_SETTINGS.refusal(
        f"a layer or the loss calls {name} in its {work.what}, and torch keeps that setting once for all threads, so "
        "it would apply to other stages too and perhaps not here"
    )


def _touch_generators() -> None:
    work = here.work
    if work is None or work.mode is None or work.what != "forward":
        return
    if _caller() == _CHECKPOINT:  # which asks whether or not anything is drawn
        if work.mode.first_call is not None:
            work.mode.first_call.checkpoints = True
    elif not work.mode.alone:
        work.mode.run_alone("a layer uses the state of torch's generators")


def _enter_checkpoint() -> None:
    """Also one that does not ask for the state of generators."""
    work = here.work
    if work is not None and work.mode is not None and work.what == "forward":
        work.mode.checkpoints = True


def _set_state() -> bool | None:
    """A checkpoint brings generators to where they stood in its forward, whether or not anything was drawn there. Where
    something was, the backward has them to itself. Otherwise another thread may be drawing from them.
    """
    _touch_generators()
    return True if _is_idle_checkpoint() else None


def _get_state() -> Tensor | None:
    """Nor is that of the CPU asked for: two threads that do so at once may wait for each other for ever, since torch
    holds its lock while Python collects garbage, and lets others run.
    """
    _touch_generators()
    return _ANY_STATE if _is_idle_checkpoint() else None


def _is_idle_checkpoint() -> bool:
    """Whether it is a checkpoint that asks, which draws nothing: where it does, it has the generators to itself."""
    work = here.work
    if work is None or work.mode is None or work.mode.one_thread or is_held():
        return False
    return _caller() == _CHECKPOINT


def _enter_level() -> None:
    work = here.work
    if work is not None and work.mode is not None and work.what == "forward":
        work.mode.run_alone("a layer takes forward-mode derivatives")


def _has_own_function(args: Any) -> bool:
    """Asked by attention, which takes its fast path if no tensor and no mode sees torch's functions: ours, which leaves
    them as they are, is none of these.
    """
    if torch.compiler.is_compiling() or not _modes_are_ours():
        return torch.overrides.has_torch_function_variadic(*args)
    off = torch._C._disabled_torch_function_impl
    return any(type(each) is not Tensor and getattr(type(each), "__torch_function__", off) is not off for each in args)


def _modes_are_ours() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()
    return all(type(each).__module__.startswith("gapless.") for each in modes)


def _enter_autocast() -> int:
    depth = increment_nesting()
    if autocast_is_on():
        work = here.work
        if work is None or work.mode is None:
            here.casts = True
        elif here.alone is None and not work.mode.casts_all:
            work.mode.casts_by_itself = True
            here.alone = exclusively()
            here.alone.__enter__()
            with _Casting.lock:
                _Casting.count += 1
    return depth


def _leave_autocast() -> int:
    """What torch would let go of all casts for, if this is 0."""
    depth = decrement_nesting()
    if depth != 0:
        return depth
    if here.casts:
        here.casts = False
        return depth
    alone, here.alone = here.alone, None
    with _Casting.lock:
        _Casting.count -= alone is not None
        if alone is not None or not _Casting.count:
            clear_cache()
    if alone is not None:
        alone.__exit__(None, None, None)
    return 1


def _caller() -> str:
    """Which module has called a function of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__", "")) in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else name
