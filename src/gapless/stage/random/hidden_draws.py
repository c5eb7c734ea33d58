"""Draws that the mode does not see: scripted functions, operators without the tag.

The mode answers the random calls of torch that it sees from private generators. Whatever else touches torch's default
generators moves them, which shows when a layer of which nothing is known is called for the first time. (Who asks for
their state or seeds them is seen in every call: `process_state`.) Such a layer draws from the default generators from
then on, alone and seeded (`Mode.alone`). So does every layer in its first call, since what it draws then must count
too: nothing starts again.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .draws import Draws, stands_at


class Touched:
    """Whether a default generator was touched, other than by gapless and by torch's checkpoint, which is known; or by
    a draw inside of a checkpoint, which runs again when nobody watches.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self.devices = {generator.device for generator in generators}
        self._stood = [generator.get_state() for generator in generators]
        self.seen = False
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


@contextlib.contextmanager
def watched(draws: Draws, device: torch.device) -> Iterator[Touched]:
    """While it holds, the default generators of the CPU and of this device go on where those of the layer stand, no
    other thread of ours uses them, and whatever this thread does with them is noted; afterwards they are as before.
    """
    with draws.all_swapped_in([device]) as generators:
        touched = Touched(generators)
        try:
            yield touched
        finally:
            touched.look()
