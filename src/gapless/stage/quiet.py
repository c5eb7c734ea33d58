"""Layers that draw nothing run without the mode, which costs more on every torch call than a small kernel takes.

Of a user's layer nothing is known, so its first call runs inside the mode. One in which the mode had nothing to answer
is quiet, and the next forward calls it just so. Should it draw after all, some day, torch's default generators have
moved when the forward is over: they are put back, and it runs again, inside, as all that follow. Where other threads
draw too, nobody could tell who has moved them, and a draw could come from what is theirs. So layers are quiet only if
their stage's device is the only one of the process, and only until another pipeline in another thread draws.
"""

import ctypes
from collections.abc import Sequence

import torch

from .exclusive import entries_of_others, exclusively
from .mode import Restart

Key = tuple[int, bool]  # the number of a layer, and whether it trains


class Quiet:
    """The layers of one stage that draw nothing, as far as is known; a context around a forward that runs some so."""

    def __init__(self, *, allowed: bool) -> None:
        self._layers: set[Key] = set()
        self._given_up = not allowed
        self._generators: Sequence[torch.Generator] = ()
        self._before: list[bytes] = []
        self._others = 0

    def __contains__(self, layer: Key) -> bool:
        return layer in self._layers

    def __bool__(self) -> bool:
        return bool(self._layers)

    def add(self, layer: Key) -> None:
        """In this call it had nothing to ask."""
        if not self._given_up:
            self._layers.add(layer)

    def around(self, generators: Sequence[torch.Generator]) -> "Quiet":
        """Those that calls of the forward would draw from."""
        self._generators = generators
        return self

    def __enter__(self) -> None:
        self._others = entries_of_others()
        self._before = [_state(each) for each in self._generators]

    def __exit__(self, kind: object, *_: object) -> None:
        moved = [pair for pair in zip(self._generators, self._before, strict=True) if _state(pair[0]) != pair[1]]
        if not moved and self._others == entries_of_others():
            return
        self._given_up = True
        self._layers.clear()
        if kind is None:
            with exclusively():
                for generator, state in moved if self._others == entries_of_others() else ():
                    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
            raise Restart


def _state(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())
