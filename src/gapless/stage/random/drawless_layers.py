"""Layers that were seen to draw nothing run outside of the mode, which costs a sixth of a step on small tensors; but
only where one thread of the process computes: what began to draw unseen would change what others draw.

A layer may begin to draw later on: its dropout gets a probability, noise sets in after a thousand steps. And a layer
inside of the mode may begin to draw in a way that the mode does not see. So torch's default generators are looked at
before and after a forward. If they have moved, all layers are watched as if they were new, from the start of this
forward. If one of them draws then, the generators are put back to where they stood. Otherwise it was somebody else, a
thread of the user's, whose numbers must not come twice. To ask a generator where it stands costs as much as a small
layer, so what one forward leaves is where the next one of its step begins.

Where several threads compute, a layer may begin to draw so that the mode does not see it just while another thread has
its own numbers in the generators. That goes unnoticed.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .draws import default_generators, stands_at
from .exclusive import exclusively, mine

_MOST_MOVES = 3
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")  # what a batch norm of the user's own has too
Call = tuple[int, bool]  # the number of a layer, and whether it trains
Stood = list[tuple[torch.Generator, Tensor]]  # generators, and their states


class _PutBack:
    """How often generators were put back, by whomever: that hides what another forward has drawn meanwhile."""

    times = 0


class Unwatched:
    """Which layers of a stage run so, and where the generators stood when its forward began. Nothing is looked at if
    nothing is `unknown`. `is_open`: there is code among them that is not torch's own, which may draw in a way that the
    mode does not see.
    """

    def __init__(self, *, unknown: bool, is_open: bool) -> None:
        self._is_open, self._unknown = is_open, unknown
        self.known: set[Call] = set()
        self.allowed = False
        self._before: Stood | None = None
        self._stood: Stood | None = None  # where they stood in the last forward of this step, to whose end none moved
        self._put_back = 0
        self._looks = _MOST_MOVES if unknown else 0
        self.doubt: Stood | None = None  # where the generators stood before they moved, in the run before this one
        self._suspects: set[Call] = set()
        self.has_settled = False  # it was a layer of this forward that has moved them

    @property
    def trusted(self) -> set[int]:
        """The numbers of those that run so."""
        return {number for number, _ in self.known}

    @property
    def has_given_up(self) -> bool:
        """Whether there was something to look for, and too often it was somebody else who has drawn."""
        return self._unknown and not self._looks

    def enter(self) -> None:
        """A forward comes, which may take several runs."""
        self.doubt, self._suspects, self.has_settled = None, set(), False

    def begin(self, device: torch.device, *, apart: bool, allowed: bool) -> None:
        """A run of it starts. Its layers are to draw from other generators than torch's default ones, if these are kept
        `apart`; those that draw nothing may be `allowed` to run unwatched.
        """
        self._before, self.allowed = None, allowed
        if not apart:  # a layer was seen to draw in another way than the mode sees
            self._settle()
        if not self._looks or not apart or not (allowed or self._is_open):
            return
        if self._stood is not None and self._put_back == _PutBack.times:
            self._before = self._stood
            return
        with exclusively():
            self._before = [(each, each.get_state()) for each in default_generators(_devices(device))]
            self._put_back = _PutBack.times

    def runs(self, call: Call) -> bool:
        """Whether this one needs no watching now, where that is allowed."""
        return self._before is not None and call in self.known

    def learn(self, call: Call, layer: nn.Module) -> None:
        """A call was watched, and drew nothing. What a batch norm counts does not show in a generator."""
        if self._looks < _MOST_MOVES or call in self.known:
            return
        if not any(
            isinstance(module, _NormBase) or any(name in module._buffers for name in _OF_NORMS)
            for module in layer.modules()
        ):
            self.known.add(call)

    def drew(self, call: Call) -> None:
        """A call was watched, and drew. If it ran unwatched before, it was the one that moved the generators."""
        if call in self._suspects:
            self._settle()

    def _settle(self) -> None:
        """It was a layer that has drawn: the caller's generators are left as they were."""
        if self.doubt is None:
            return
        with exclusively():
            for generator, state in self.doubt:
                generator.set_state(state)
            _PutBack.times += 1
            if self._before is not None:
                self._before, self._put_back = self.doubt, _PutBack.times
        self.doubt, self._suspects, self.has_settled = None, set(), True

    def hides(self) -> None:
        """A call was watched, and drew unseen: generators had moved, and were put back."""
        with exclusively():
            _PutBack.times += 1
            self._put_back += 1
        self._settle()

    def moved(self) -> bool:
        """The run is over: whether something may have been drawn unseen. If so, all are watched from now on.
        Another thread, of the user's, may draw too: so not too often.
        """
        before, self._before = self._before, None
        self.doubt, self._suspects = None, set()
        if before is None:
            return False
        stay = True
        with mine.lock:
            for generator, state in before:
                if _dispatch_modes():
                    stay = stay and stands_at(generator, state)
                else:  # the same without a call
                    stay = stay and torch.equal(generator.get_state(), state)
            if stay and self._put_back == _PutBack.times:
                self._stood = before
                return False
        self._stood, self.doubt, self._suspects, self.known = None, before, self.known, set()
        self._looks -= 1
        return True

    def rest(self) -> None:
        """A step ends, or begins: others may draw in between."""
        self._stood = None

    def stop(self) -> None:
        """Others draw from these generators during a forward, so nothing is looked at any more, and all are watched."""
        self._looks = 0
        self.known.clear()


def _devices(device: torch.device) -> list[torch.device]:
    """Where layers may draw: those without parameters on the GPU that is current."""
    if device.type == "cpu" and torch.cuda.is_initialized():
        return [torch.device("cuda", torch.cuda.current_device())]
    return [device]
