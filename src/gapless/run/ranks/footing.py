"""What a stream needs of its rank: the links to the ranks before and after it, and words that all of them exchange."""

import json
from typing import Any, NamedTuple

import torch

from gapless.run.lanes import Lane
from gapless.run.ranks.seat import Groups, Seat
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire.connections import Connections
from gapless.run.team import Team


class Footing(NamedTuple):
    """One rank of a pipeline, with its links and the group of all."""

    seat: Seat
    links: Connections
    groups: Groups
    lane: Lane
    team: Team
    watch: Watch

    def everywhere(self, own: Any) -> list[Any]:
        """What each rank of the mesh has to say, as JSON can: the devices of the first replica, then those of the next.
        All of them call it.
        """
        rows = _gathered(self.groups.dp, _gathered(self.groups.pp, own))
        return [each for row in rows for each in row]


def _gathered(group: Any, own: Any) -> list[Any]:
    """Of each rank of the group."""
    if group is None:
        return [own]
    mine = torch.tensor(list(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(mine)])]).wait()
    longest = int(max(sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    group.allgather([rows], [torch.cat([mine, mine.new_zeros(longest - len(mine))])]).wait()
    return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]
