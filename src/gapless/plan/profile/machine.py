"""The devices there are, and how they are shared out: K of them make a pipeline, and `replicas` pipelines train side by
side on their shares of the minibatch.

    mesh of 2 replicas x 3 devices      replica outside: 0 1 2 | 3 4 5      inside: 0 2 4 | 1 3 5
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.errors import ConfigError, PlanError
from gapless.plan.profile.profile import Link, Profile
from gapless.units import show_bytes, show_count

_MESSAGE = 2**20  # bytes of the message that tells which of several links is the slowest


@dataclass(frozen=True)
class Device:
    """What differs between devices: bytes of memory (None: no limit), and speed as a share of the profile's."""

    memory: int | None = None
    speed: float = 1.0


def check_devices(devices: Sequence[Device]) -> None:
    """Raises where one of them makes no sense."""
    if not devices:
        raise ConfigError("there are no devices: a plan needs at least 1")
    for number, device in enumerate(devices):
        if not 0 < device.speed < float("inf"):
            raise ConfigError(
                f"the speed of device {number} is {device.speed:g}, but it must be a number above 0; 1 is "
                "the speed that was measured"
            )
        if device.memory is not None and device.memory <= 0:
            raise ConfigError(f"the memory of device {number} is {device.memory} bytes, but it must be above 0")


def check_reach(profile: Profile, num_devices: int) -> None:
    """Raises where the profile has no link that reaches so many devices."""
    reach = profile.links[-1].devices if profile.links else None
    if reach is not None and reach < num_devices:
        raise ConfigError(
            f"the links of the profile reach {show_count(reach, 'device')}, but there are {num_devices}: add the link "
            f"between groups of {reach}"
        )


def check_host(profile: Profile, offload: str) -> None:
    """Raises where something is to be offloaded and nobody knows how fast."""
    if offload != "none" and (profile.host is None or profile.host.bandwidth is None):
        raise ConfigError(
            "to offload, a plan must know how fast the link to the host is, which the profile does not say: give "
            "--host-bandwidth, as 25GB/s"
        )


def check_layers(profile: Profile, devices: Sequence[Device]) -> None:
    """A layer that no device can hold is said first: no choice would help."""
    memories = [device.memory for device in devices]
    most = max((memory for memory in memories if memory is not None), default=0)
    if None in memories:
        return
    for number, layer in enumerate(profile.layers):
        need = layer.parameters + layer.gradients + layer.optimizer_state + layer.libraries + profile.reserved
        if need > most:
            raise PlanError(
                f"layer {number} ({layer.name[:60]}) alone needs {show_bytes(need)} for its parameters "
                f"({show_bytes(layer.parameters)}), gradients and optimizer state, but the largest device has "
                f"{show_bytes(most)}: cut it into smaller layers, or use devices of at least {show_bytes(need)}"
            )


@dataclass(frozen=True)
class Mesh:
    """Which devices make which pipeline. `inside`: the replicas of a stage are neighbours, not the stages. `order`: the
    devices that take the places of the mesh, where these are not the first ones in the order in which they are given.
    """

    replicas: int
    num_devices: int  # of one pipeline
    inside: bool = False
    order: tuple[int, ...] = ()

    @property
    def dimensions(self) -> tuple[tuple[str, int], ...]:
        """The outermost first, as torch's init_device_mesh takes them."""
        parts = (("dp", self.replicas), ("pp", self.num_devices))
        return parts[::-1] if self.inside else parts

    def device(self, replica: int, position: int) -> int:
        """The number among all devices of the one at `position` of a pipeline."""
        place = position * self.replicas + replica if self.inside else replica * self.num_devices + position
        return self.order[place] if self.order else place

    def hop(self, profile: Profile, one: int, other: int) -> Link:
        """What connects two positions of a pipeline; of all replicas the slowest."""
        links = [profile.link(self.device(r, one), self.device(r, other)) for r in range(self.replicas)]
        return max(links, key=lambda link: link.latency + link.seconds(_MESSAGE))

    def sum_seconds(self, profile: Profile, position: int, size: float) -> float:
        """How long the replicas of a position take to add up `size` bytes of gradients."""
        link = profile.link(self.device(0, position), self.device(self.replicas - 1, position))
        return link.all_reduce(size, self.replicas)
