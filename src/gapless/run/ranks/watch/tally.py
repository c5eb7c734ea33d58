"""How many updates the stage of each rank has made, for when a stream breaks off: whoever loses the others tells its
neighbours in the ring, and they pass it on.
"""

import time
from collections.abc import Mapping

from gapless.run.ranks.watch.ring import Ring

_SOON = 0.01  # seconds
_WITHIN = 2.0


class Tally:
    """As known on this rank, by rank."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._known: dict[int, int] = {}

    def tell(self, rank: int, updates: int) -> None:
        """Of this rank."""
        self.hear({str(rank): updates})

    def hear(self, counts: Mapping[str, int]) -> None:
        """From a neighbour; what is new goes on round the ring."""
        new = {rank: updates for rank, updates in counts.items() if int(rank) not in self._known}
        self._known.update({int(rank): updates for rank, updates in new.items()})
        if new:
            self._ring.say({"counts": new})

    def known(self, ranks: int) -> dict[int, int]:
        """So many are expected, and the last of them may be on their way."""
        deadline = time.monotonic() + _WITHIN
        while len(self._known) < ranks and time.monotonic() < deadline:
            time.sleep(_SOON)
        return dict(self._known)
