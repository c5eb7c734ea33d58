"""Where this process stands in a torch DeviceMesh, and the groups of gapless's own along its dimensions.

    pp   one device of the pipeline per rank: stages, activations, gradients
    dp   replicas of the pipeline, each with its share of the minibatch
    tp   the ranks that together are one device; their layers are DTensors and talk among themselves

The user's process groups are left alone: ours are made through the same store, carry nothing but ours, and end with
`close`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gapless._version import __version__
from gapless.errors import ConfigError
from gapless.run.ranks.wire.groups import Group, connected

DIMENSIONS = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Seat:
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


def take_seat(mesh: Any) -> Seat:
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
    return Seat(
        mesh,
        here,
        mesh.get_local_rank("pp"),
        mesh.get_local_rank("dp") if "dp" in names else 0,
        _ranks(mesh, "pp"),
        _ranks(mesh, "dp") if "dp" in names else (dist.get_rank(),),
    )


def in_one_line(mesh: Any) -> Seat:
    """Where this rank is if all ranks of the mesh, in its order, are one pipeline."""
    seat = take_seat(mesh)
    if seat.num_devices * seat.num_replicas != mesh.size():
        raise ConfigError(
            "a device of this mesh has several ranks (tp), but links are measured between single ranks only: pass "
            "links="
        )
    ranks = tuple(mesh.mesh.flatten().tolist())
    me = dist.get_rank()
    return replace(seat, device=ranks.index(me), replica=0, pp_ranks=ranks, dp_ranks=(me,))


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

    def meeting(self, seat: Seat) -> Group | None:
        """Of all ranks of the mesh, for what may go on beside a step. All of them call it."""
        if self.everyone is None:
            place = seat.ring.index(dist.get_rank())
            self.everyone = connected("checkpoints", seat.ring, place, self.network)
        return self.everyone

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


def make_groups(seat: Seat, network: Any) -> Groups:
    """The same call on every rank of the mesh; each group has its own connections."""
    pp = connected("pp", seat.pp_ranks, seat.device, network)
    dp = connected("dp", seat.dp_ranks, seat.replica, network)
    return Groups(pp, dp, network)
