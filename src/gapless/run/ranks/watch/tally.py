"""How many updates the stage of each rank has made, for when a stream breaks off: whoever loses the others tells its
neighbours in the ring, and they pass it on.
"""

import time
from collections.abc import Mapping, Sequence

from gapless.run.ranks.watch.ring import Neighbour

_SOON = 0.01  # seconds
_WITHIN = 2.0


class Tally:
    """As known on this rank, by device."""

    def __init__(self, neighbours: Sequence[Neighbour]) -> None:
        self._neighbours = neighbours
        self._known: dict[int, int] = {}

    def tell(self, device: int, updates: int) -> None:
        """Of this rank."""
        self.hear({str(device): updates})

    def hear(self, counts: Mapping[str, int]) -> None:
        """From a neighbour; what is new goes on round the ring."""
        new = {device: updates for device, updates in counts.items() if int(device) not in self._known}
        self._known.update({int(device): updates for device, updates in new.items()})
        for neighbour in self._neighbours if new else ():
            neighbour.say({"counts": new})

    def known(self, devices: int) -> dict[int, int]:
        """So many are expected, and the last of them may be on their way."""
        deadline = time.monotonic() + _WITHIN
        while len(self._known) < devices and time.monotonic() < deadline:
            time.sleep(_SOON)
        return dict(self._known)
