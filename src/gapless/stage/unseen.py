"""Draws that the mode does not see: scripted functions, operators without the tag, `torch.manual_seed` in a layer.

The mode answers the random calls of torch that it sees from private generators. Whatever else touches torch's default
generators shows itself in one of two ways, when a layer of which nothing is known is called for the first time:

    the state of a default generator has moved        somebody drew, or seeded it
    a method of a default generator was called        somebody asked for the state, or put one back

Such a layer draws from the default generators from then on, alone and seeded (`Mode.alone`), and starts again. The call
also tells whether a layer enters an autocast of its own.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from .draws import alone, default_generators, stands_at

_HERE = __name__.rpartition(".")[0]


class Touched:
    """Whether a default generator was touched, other than by gapless and by torch's checkpoint, which is known."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self.seen = False
        self.casts = False  # whether an autocast was entered

    def note(self, frame: FrameType, event: str, called: Any) -> None:
        """What `sys.setprofile` calls."""
        if event == "c_call" and called is torch.autocast_increment_nesting:
            self.casts = self.casts or not _is_known(frame.f_back)
        elif event == "c_call" and any(getattr(called, "__self__", None) is each for each in self._generators):
            self.seen = self.seen or not _is_known(frame)


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[Touched]:
    """While it holds, whatever this thread does with the default generators of the CPU and of this device is noted, and
    no other thread of ours uses them; afterwards they are as before.
    """
    generators = default_generators([device])
    touched = Touched(generators)
    with alone(generators) as before:
        profile = sys.getprofile()
        sys.setprofile(touched.note)
        try:
            yield touched
        finally:
            _put_back(profile)
            states = zip(generators, before, strict=True)
            touched.seen |= any(not stands_at(generator, state) for generator, state in states)


def _put_back(profile: Any) -> None:
    """Of a thread that is profiled. Before Python 3.12 cProfile is there as an object that can't be called."""
    if hasattr(profile, "enable"):
        profile.enable()
    else:
        sys.setprofile(profile)


def _is_known(frame: FrameType | None) -> bool:
    """Whether gapless called, or a checkpoint, which asks whether or not anything is drawn."""
    while frame is not None and (name := frame.f_globals.get("__name__", "")) in ("torch.random", "torch.cuda.random"):
        frame = frame.f_back
    return frame is not None and (name.startswith(_HERE) or name == "torch.utils.checkpoint")
