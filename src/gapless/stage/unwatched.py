"""Layers that were seen to draw nothing run outside of the mode, which costs a sixth of a step on small tensors.

A layer may begin to draw later on: its dropout gets a probability, noise sets in after a thousand steps. And a layer
inside of the mode may begin to draw in a way that the mode does not see. So torch's default generators are looked at
before and after a forward. If they have moved, they are put back, and all layers are watched as if they were new, from
the start of this forward.
"""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .draws import default_generators
from .exclusive import exclusively, if_free

_MOST_MOVES = 3
Call = tuple[int, bool]  # the number of a layer, and whether it trains


class Unwatched:
    """Which layers of a stage run so, and where the generators stood when its forward began. Nothing is looked at if
    nothing is `unknown`.
    """

    def __init__(self, *, unknown: bool) -> None:
        self._known: set[Call] = set()
        self._allowed = False
        self._before: list[Tensor] | None = None
        self._generators: list[torch.Generator] = []
        self._looks = _MOST_MOVES if unknown else 0

    def begin(self, device: torch.device, *, apart: bool, allowed: bool) -> None:
        """A forward starts. Its layers are to draw from other generators than torch's default ones, if these are kept
        `apart`; those that draw nothing may be `allowed` to run unwatched. Where another thread uses the generators,
        all are watched.
        """
        self._before, self._allowed = None, allowed
        if not self._looks or not apart:
            return
        with if_free() as free:
            if free:
                self._generators = default_generators([device])
                self._before = [each.get_state() for each in self._generators]

    def runs(self, call: Call) -> bool:
        """Whether this one needs no watching now."""
        return self._allowed and self._before is not None and call in self._known

    def learn(self, call: Call, layer: object) -> None:
        """A call was watched, and drew nothing. What a batch norm counts does not show in a generator."""
        if self._looks < _MOST_MOVES or call in self._known or not isinstance(layer, nn.Module):
            return
        if not any(isinstance(module, _NormBase) for module in layer.modules()):
            self._known.add(call)

    def moved(self) -> bool:
        """The forward is over: whether something was drawn unseen. If so, all are watched from now on. Another thread,
        of the user's, may draw too: so not too often.
        """
        if self._before is None:
            return False
        before, self._before = self._before, None
        with exclusively():
            if all(torch.equal(each.get_state(), state) for each, state in zip(self._generators, before, strict=True)):
                return False
            for each, state in zip(self._generators, before, strict=True):
                each.set_state(state)
        self._known.clear()
        self._looks -= 1
        return True
