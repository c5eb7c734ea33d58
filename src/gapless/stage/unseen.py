"""Draws that the mode does not see: scripted functions, operators without the tag, `torch.manual_seed` in a layer.

The mode answers the random calls of torch that it sees from private generators. Whatever else touches torch's default
generators shows itself in one of two ways, when a layer of which nothing is known is called for the first time:

    the state of a default generator has moved        somebody drew, or seeded it
    a method of a default generator was called        somebody asked for the state, or put one back

Such a layer draws from the default generators from then on, alone and seeded (`Mode.alone`). So does every layer in its
first call, since what it draws then must count too: nothing starts again. The call also tells whether a layer enters an
autocast of its own, and whether it touches what else torch keeps once for all threads: forward-mode derivatives, for
which a layer that runs alone is safe, and settings (`EVERYBODYS`), for which no stage is, whether it runs alone or not.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import parametrize

from .draws import Draws, stands_at

_CHECKPOINT = "torch.utils.checkpoint"
_HERE = __name__.rpartition(".")[0]


def _of(place: Any, *names: str) -> dict[Any, str]:
    """Functions of torch, as far as this version has them, each with what a user would call it."""
    found = [getattr(place, name) for name in names if hasattr(place, name)]
    return {getattr(inspect.unwrap(each), "__code__", each): each.__name__.lstrip("_") for each in found}


# What sets something for the whole process: C functions, and the code of Python functions.
EVERYBODYS: dict[Any, str] = {
    **_of(
        torch._C, "_set_default_dtype", "_set_deterministic_algorithms", "_set_deterministic_fill_uninitialized_memory"
    ),
    **_of(torch._C, "_set_float32_matmul_precision", "_set_fp32_precision_setter", "_set_cublas_allow_tf32"),
    **_of(torch._C, "_set_sdp_use_flash", "_set_sdp_use_mem_efficient", "_set_sdp_use_math", "_set_sdp_use_cudnn"),
    **_of(torch._C, "_set_cudnn_enabled", "_set_cudnn_benchmark", "_set_cudnn_deterministic", "_set_cudnn_allow_tf32"),
    **_of(torch._C, "_set_mkldnn_enabled", "_set_nnpack_enabled", "_set_check_sparse_tensor_invariants"),
    **_of(torch, "set_anomaly_enabled", "set_num_threads", "set_flush_denormal"),
    **_of(torch.backends.mha, "set_fastpath_enabled"),
    **_of(torch.utils.checkpoint, "set_checkpoint_early_stop", "set_checkpoint_debug_enabled"),
    inspect.unwrap(parametrize.cached).__code__: "parametrize.cached",
}


class Touched:
    """Whether a default generator was touched, other than by gapless and by torch's checkpoint, which is known; or by
    a draw inside of a checkpoint, which runs again when nobody watches.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self.devices = {generator.device for generator in generators}
        self._stood = [generator.get_state() for generator in generators]
        self.seen = False
        self.casts = False  # whether an autocast was entered
        self.sets: str | None = None  # a function that was called and sets something for all threads
        self.checkpoints = False  # whether a checkpoint was, whose backward goes back to these states

    def look(self) -> None:
        """Whether anybody has drawn since the last look."""
        self.seen |= any(not stands_at(*each) for each in zip(self._generators, self._stood, strict=True))

    @contextlib.contextmanager
    def drawing(self, in_checkpoint: bool) -> Iterator[None]:
        """Around a draw that the mode has seen."""
        self.look()
        self.seen |= in_checkpoint
        try:
            yield
        finally:
            self._stood = [generator.get_state() for generator in self._generators]

    def note(self, frame: FrameType, event: str, called: Any) -> None:
        """What `sys.setprofile` calls."""
        if event == "call":
            self.sets = self.sets or EVERYBODYS.get(frame.f_code)
        elif event != "c_call":
            return
        elif called is torch.autocast_increment_nesting:
            self.casts = self.casts or _caller(frame.f_back) is None
        elif any(getattr(called, "__self__", None) is each for each in self._generators):
            caller = _caller(frame)
            self.seen |= caller is None
            self.checkpoints |= caller == _CHECKPOINT
        elif called is torch._C._enter_dual_level:
            self.seen = True
        elif called in EVERYBODYS and not frame.f_globals.get("__name__", "").startswith("gapless."):
            self.sets = self.sets or EVERYBODYS[called]


@contextlib.contextmanager
def watched(draws: Draws, device: torch.device) -> Iterator[Touched]:
    """While it holds, the default generators of the CPU and of this device go on where those of the layer stand, no
    other thread of ours uses them, and whatever this thread does with them is noted; afterwards they are as before.
    """
    with draws.all_swapped_in([device]) as generators:
        touched = Touched(generators)
        profile = sys.getprofile()
        sys.setprofile(touched.note)
        try:
            yield touched
        finally:
            _put_back(profile)
            touched.look()


def _put_back(profile: Any) -> None:
    """Of a thread that is profiled. Before Python 3.12 cProfile is there as an object that can't be called."""
    if hasattr(profile, "enable"):
        profile.enable()
    else:
        sys.setprofile(profile)


def _caller(frame: FrameType | None) -> str | None:
    """Which module called, if it is gapless, or a checkpoint, which asks whether or not anything is drawn."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")) in ("torch.random", "torch.cuda.random"):
        frame = frame.f_back
    return name if frame is not None and (name.startswith(_HERE) or name == _CHECKPOINT) else None
