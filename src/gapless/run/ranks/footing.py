"""What a stream needs of its rank: the links to the ranks before and after it, and words that all of them exchange."""

import io
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
        row = [json.loads(each) for each in of_each(self.groups.pp, json.dumps(own).encode())]
        rows = [json.loads(each) for each in of_each(self.groups.dp, json.dumps(row).encode())]
        return [each for row in rows for each in row]

    def of_all_stages(self, own: Any) -> list[Any]:
        """A tree of tensors and plain values of each rank of this pipeline, on the CPU. All of them call it."""
        file = io.BytesIO()
        torch.save(own, file)
        found = (io.BytesIO(each) for each in of_each(self.groups.pp, file.getvalue()))
        return [torch.load(each, map_location="cpu", weights_only=True) for each in found]


def of_each(group: Any, own: bytes) -> list[bytes]:
    """Of each rank of the group."""
    if group is None:
        return [own]
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(mine)])]).wait()
    longest = int(max(sizes))
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    group.allgather([rows], [torch.cat([mine, mine.new_zeros(longest - len(mine))])]).wait()
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
