"""What the links between ranks take, measured: for a plan that is made where it will run."""

from typing import TYPE_CHECKING

from gapless.plan.profile.profile import Link

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gapless.run.ranks.link_speed import Hop


def measure_links(mesh: "DeviceMesh", timeout: float = 600.0) -> tuple[Link, ...]:
    """Between the ranks of a mesh, under torchrun: within a host and between hosts, each as slow as its slowest hop.

    Every rank calls it, and all get the same. Hops go from each rank to the next in the order of the mesh, one after
    another, through the channels that a pipeline uses there. `make_plan(..., links=measure_links(mesh))` plans with
    them.
    """
    from gapless.run.ranks.one_line import in_one_line  # here alone: torch.distributed need not be there

    with in_one_line(mesh, timeout) as line:
        return levels(line.hops())


def levels(hops: "list[Hop]") -> tuple[Link, ...]:
    """From the innermost out. Hosts that hold different numbers of devices make one level, with the slowest of all."""
    far = [place for place, hop in enumerate(hops, start=1) if not hop.near]
    if not hops:
        return ()
    if not far:
        return (_slowest("one host", None, hops),)
    each = far[0]
    even = far == list(range(each, len(hops) + 1, each)) and (len(hops) + 1) % each == 0
    between = [hop for hop in hops if not hop.near]
    if not even:
        return (_slowest("the slowest hop", None, hops),)
    inner = [hop for hop in hops if hop.near]
    return (
        *([_slowest("one host", each, inner)] if inner else []),
        _slowest("between hosts", None, between),
    )


def _slowest(name: str, devices: int | None, hops: "list[Hop]") -> Link:
    return Link(name, devices, max(hop.latency for hop in hops), min(hop.bandwidth for hop in hops))
