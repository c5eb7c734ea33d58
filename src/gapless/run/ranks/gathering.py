"""All ranks of a mesh, telling each other what they have to save: over connections of their own, so that steps may go
on meanwhile.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gapless.errors import TransportError
from gapless.run.ranks.footing import of_each
from gapless.run.ranks.seat import Groups, Seat
from gapless.run.ranks.watch.watch import Watch


class RankGathering:
    """Made by all ranks at once; it may be used in another thread later."""

    def __init__(self, seat: Seat, groups: Groups, watch: Watch) -> None:
        self.ranks: Sequence[int] = seat.ring
        self.place = self.ranks.index(dist.get_rank())
        self._group, self._watch = groups.meeting(seat), watch

    def everywhere(self, own: Any) -> list[Any]:
        try:
            return [json.loads(each) for each in of_each(self._group, json.dumps(own).encode())]
        except RuntimeError as error:
            raise (error if isinstance(error, TransportError) else self._watch.lost(None, error)) from None

    def note(self, doing: str) -> None:
        self._watch.whereabouts.call = doing
