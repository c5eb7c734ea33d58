"""Where this process stands in a torch DeviceMesh, and the groups of gapless's own along its dimensions.

    pp   one device of the pipeline per rank: stages, activations, gradients
    dp   replicas of the pipeline, each with its share of the minibatch
    tp   the ranks that together are one device; their layers are DTensors and talk among themselves

The user's process groups are left alone: ours are made through the same store, carry nothing but ours, and end with
`close`.
"""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gapless._version import __version__
from gapless.errors import ConfigError, TransportError
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire.groups import Group, bytes_of_each, connected

DIMENSIONS = ("pp", "dp", "tp")


@dataclass(frozen=True)
class MeshPosition:
    """A rank's place: its device of the pipeline, its replica, and who else is in its row of each dimension."""

    mesh: DeviceMesh
    torch_device: torch.device
    device: int
    replica: int
    pp_ranks: tuple[int, ...]
    dp_ranks: tuple[int, ...]

    @property
    def ring(self) -> tuple[int, ...]:
        """All ranks of the mesh, neighbours in the pipeline next to each other."""
        names = self.mesh.mesh_dim_names or ()
        return tuple(self.mesh.mesh.movedim(names.index("pp"), -1).flatten().tolist())

    @property
    def replicas_inside(self) -> bool:
        """Whether the replicas of a device are neighbours in the mesh, and not the devices of a pipeline."""
        names = self.mesh.mesh_dim_names or ()
        return "dp" in names and names.index("dp") > names.index("pp")

    @property
    def num_devices(self) -> int:
        return len(self.pp_ranks)

    @property
    def num_replicas(self) -> int:
        return len(self.dp_ranks)


def mesh_position(mesh: Any) -> MeshPosition:
    """Where this rank is in the mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is {mesh!r:.40}, but it must be a torch DeviceMesh with a dimension 'pp'")
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in DIMENSIONS]
    if "pp" not in names or unknown:
        raise ConfigError(
            f"the mesh has the dimensions {', '.join(map(repr, names)) or 'without names'}: 'pp' must be there, 'dp' "
            "and 'tp' may be; name them with mesh_dim_names= of init_device_mesh"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the mesh: only its ranks make the pipeline")
    if mesh.device_type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the mesh is of {mesh.device_type} devices, which are neither cpu nor cuda: make it with "
            "init_device_mesh('cpu', ...) or ('cuda', ...)"
        )
    here = torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return MeshPosition(
        mesh,
        here,
        mesh.get_local_rank("pp"),
        mesh.get_local_rank("dp") if "dp" in names else 0,
        _ranks(mesh, "pp"),
        _ranks(mesh, "dp") if "dp" in names else (dist.get_rank(),),
    )


def as_one_pipeline(mesh: Any) -> MeshPosition:
    """Where this rank is if all ranks of the mesh, in its order, are one pipeline."""
    position = mesh_position(mesh)
    if position.num_devices * position.num_replicas != mesh.size():
        raise ConfigError(
            "a device of this mesh has several ranks (tp), but links are measured between single ranks only: pass "
            "links="
        )
    ranks = tuple(mesh.mesh.flatten().tolist())
    me = dist.get_rank()
    return replace(position, device=ranks.index(me), replica=0, pp_ranks=ranks, dp_ranks=(me,))


def facts_of(mesh: DeviceMesh) -> dict[str, Any]:
    """What must be the same on all ranks, before anything else is."""
    return {
        "torch": torch.__version__,
        "gapless": __version__,
        "world size": dist.get_world_size(),
        "mesh": {
            "device type": mesh.device_type,
            "dimensions": list(mesh.mesh_dim_names or ()),
            "shape": list(mesh.shape),
            "ranks": mesh.mesh.flatten().tolist(),
        },
    }


def _ranks(mesh: DeviceMesh, dimension: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dimension)))


@dataclass
class Groups:
    """Gloo groups along the dimensions, over one network device. None where a dimension has one rank."""

    pp: Group | None
    dp: Group | None
    network: Any
    everyone: Group | None = None  # of the mesh, for checkpoints; made when it is first needed

    def meeting(self, position: MeshPosition) -> Group | None:
        """Of all ranks of the mesh, for what may go on beside a step. All of them call it."""
        if self.everyone is None:
            place = position.ring.index(dist.get_rank())
            self.everyone = connected("checkpoints", position.ring, place, self.network)
        return self.everyone

    def everywhere(self, own: Any) -> list[Any]:
        """What each rank of the mesh has to say, as JSON can: the devices of the first replica, then those of the next.
        All of them call it.
        """
        rows = _said(self.dp, _said(self.pp, own))
        return [each for row in rows for each in row]

    def of_all_stages(self, own: Any) -> list[Any]:
        """A tree of tensors and plain values of each rank of this pipeline, on the CPU. All of them call it."""
        file = io.BytesIO()
        torch.save(own, file)
        found = (io.BytesIO(each) for each in bytes_of_each(self.pp, file.getvalue()))
        return [torch.load(each, map_location="cpu", weights_only=True) for each in found]

    def break_off(self) -> None:
        """Whoever waits in one of them raises; links between neighbours are broken off by themselves."""
        for group in (self.dp, self.everyone):
            if group is not None:
                group.break_off()

    def close(self) -> None:
        """Ends threads and connections; what is still under way is lost."""
        for group in (self.pp, self.dp, self.everyone):
            if group is not None:
                group.close()
        self.pp = self.dp = self.everyone = self.network = None


def make_groups(position: MeshPosition, network: Any) -> Groups:
    """The same call on every rank of the mesh; each group has its own connections."""
    pp = connected("pp", position.pp_ranks, position.device, network)
    dp = connected("dp", position.dp_ranks, position.replica, network)
    return Groups(pp, dp, network)


def _said(group: Group | None, own: Any) -> list[Any]:
    return [json.loads(each) for each in bytes_of_each(group, json.dumps(own).encode())]


class RankGathering:
    """All ranks of a mesh, telling each other what they have to save: over connections of their own, so that steps may
    go on meanwhile. Made by all ranks at once; it may be used in another thread later.
    """

    def __init__(self, position: MeshPosition, groups: Groups, watch: Watch) -> None:
        self.ranks: Sequence[int] = position.ring
        self.place = self.ranks.index(dist.get_rank())
        self._group, self._watch = groups.meeting(position), watch

    def everywhere(self, own: Any) -> list[Any]:
        try:
            return _said(self._group, own)
        except RuntimeError as error:
            raise (error if isinstance(error, TransportError) else self._watch.lost_connection(None, error)) from None

    def note(self, doing: str) -> None:
        self._watch.whereabouts.call = doing
