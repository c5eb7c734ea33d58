"""What the layers of a model cost on one device, and what it takes to get from one device to the next.

Measured once, or written by hand for hardware one does not have. Times are seconds and sizes are bytes, of one
microbatch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from gapless import units
from gapless.errors import ConfigError
from gapless.plan.profile.contention import ALONE, Contention
from gapless.stage.offload import PIECE

_OPTIMIZER = ("parameters", "optimizer_state", "update_workspace")
SLACK = 0.05  # what an allocator loses between blocks that come and go, as a share of them


@dataclass(frozen=True)
class Seconds:
    """A time as measured: the median, and how far from it half of the measurements lie."""

    median: float
    spread: float = 0.0


def _size(
    like: str = "", times: int = 1, *, needed: bool = False, rounded: Callable[[float], int] | None = None
) -> Any:
    """Bytes that a file must give (`needed`), or else are `times` those of `like`, or 0; with `rounded` they grow with
    the samples.
    """
    return field(default=0, metadata={"like": like, "times": times, "needed": needed, "rounded": rounded})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of one layer, for one microbatch; the one list of them.

    gradients, optimizer_state   as many as parameters and twice as many (Adam) unless given
    activation            bytes that F leaves behind until I or B
    kept_for_weight_grad  bytes that stay from I until W, the gradients that W needs among them; as many as the
                          activation unless given
    kept_input            the part of these that is the layer's own input
    boundary              bytes of what it returns, which is what crosses where a stage ends here
    workspace             bytes it takes while B runs, on top of all that is kept, with the gradient of what it returns
    forward_workspace, halves_workspace, weight_workspace   the same for F and R, for I and for W; as many as for B
                          unless given, and for W as many as for I
    overlap               the part of the activation that is not held where the layer before is in the same stage: what
                          that one holds anyway, or an input that no backward needs
    libraries             bytes that libraries keep on a device where it has run; layers of one device share them
    update_workspace      bytes that the optimizer step takes while it runs; the layers of a device are updated together
    held_output           the part of what it returns that its activation has anyway
    passed                the part of what it returns that it was given: its gradients are copied where a stage begins
    """

    parameters: int = _size(needed=True)
    gradients: int = _size("parameters")
    optimizer_state: int = _size("parameters", 2)
    activation: int = _size(needed=True, rounded=math.ceil)
    kept_for_weight_grad: int = _size("activation", rounded=math.ceil)
    kept_input: int = _size(rounded=math.floor)
    boundary: int = _size(needed=True, rounded=math.ceil)
    workspace: int = _size(rounded=math.ceil)
    forward_workspace: int = _size("workspace", rounded=math.ceil)
    halves_workspace: int = _size("workspace", rounded=math.ceil)
    weight_workspace: int = _size("halves_workspace", rounded=math.ceil)
    overlap: int = _size(rounded=math.floor)
    libraries: int = _size()
    update_workspace: int = _size()
    held_output: int = _size(rounded=math.floor)
    passed: int = _size(rounded=math.floor)

    def kept(self, shards: int = 1) -> float:
        """Bytes that are there from the first step to the last; replicas may share out the optimizer's state."""
        return self.parameters + self.gradients + self.optimizer_state / shards

    @property
    def held(self) -> int:
        """Bytes that F leaves behind behind another layer."""
        return max(0, self.activation - self.overlap)

    @property
    def most_workspace(self) -> int:
        return max(self.workspace, self.forward_workspace, self.halves_workspace, self.weight_workspace)


@dataclass(frozen=True)
class Layer(Sizes):
    """One layer, for one microbatch: its times beside its sizes.

    forward, input_grad, weight_grad   the time of F, I and W; I and W take as long as F unless given
    recompute  the time of R; that of F unless given
    backward   the time of a whole B; an I and a W together unless given
    update     the time of the optimizer step
    overhead   the part of each of these times that a smaller microbatch does not make smaller
    """

    name: str
    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    recompute: Seconds
    backward: Seconds | None = None
    update: Seconds = Seconds(0.0)
    overhead: float = 0.0

    @property
    def whole_backward(self) -> float:
        return self.input_grad.median + self.weight_grad.median if self.backward is None else self.backward.median

    @property
    def work(self) -> float:
        """The time of a forward and a backward."""
        return self.forward.median + self.whole_backward

    def scaled(self, ratio: float) -> "Layer":
        """The layer for a microbatch of `ratio` times the samples."""

        def longer(time: Seconds) -> Seconds:
            fixed = min(self.overhead, time.median)
            return Seconds(fixed + (time.median - fixed) * ratio, time.spread * ratio)

        changed: dict[str, Any] = {}
        for name in ("forward", "input_grad", "weight_grad", "recompute", "backward"):
            changed[name] = getattr(self, name) and longer(getattr(self, name))
        for each in fields(Sizes):
            if rounded := each.metadata["rounded"]:
                changed[each.name] = rounded(getattr(self, each.name) * ratio)
        return replace(self, **changed)


@dataclass(frozen=True)
class Link:
    """A level of the machine: groups of `devices` consecutive devices (None: all) reach each other at this cost.

    bandwidth  bytes per second each way; None for a link without a limit
    """

    name: str
    devices: int | None = None
    latency: float = 0.0
    bandwidth: float | None = None

    def seconds(self, size: float) -> float:
        """How long `size` bytes are in the link, latency aside."""
        return size / self.bandwidth if self.bandwidth is not None else 0.0

    def all_reduce(self, size: float, parts: int) -> float:
        """How long so many parts of the machine take to add up `size` bytes of gradients: once around a ring to add
        and once to hand the sums on, 2(m-1) steps with 1/m of the bytes each.
        """
        if parts == 1 or not size:
            return 0.0
        return 2 * (parts - 1) * (self.seconds(size / parts) + self.latency)


@dataclass(frozen=True)
class Host:
    """What a device has of its host: the link there, in bytes per second each way (None: without a limit), what a copy
    takes whatever its size, and bytes of memory (None: without a limit).
    """

    bandwidth: float | None = None
    latency: float = 0.0
    memory: int | None = None


ANY_HOST = Host()


def read_host(bandwidth: float | str | None, memory: int | str | None, marks: str = "host_") -> Host:
    """As they are given, by arguments or options whose names begin with `marks`."""
    name = "bandwidth"
    try:
        speed = None if bandwidth is None else units.read(bandwidth, units.BANDWIDTH)
        name = "memory"
        size = None if memory is None else units.read_bytes(memory)
    except ConfigError as error:
        raise ConfigError(f"{marks}{name} {error}") from None
    return Host(speed, memory=size)


@dataclass(frozen=True)
class EntryTime:
    """Seconds that it takes to begin an action of a stage, however many layers it has: a forward (F, R) or a backward
    (I, B).
    """

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True)
class Profile:
    """The layers in order, and the links from the innermost level out.

    entry       what it takes to begin an action, on top of its layers
    contention  what devices that share a machine cost each other; times are of one device alone
    samples     in the microbatch that was measured
    input       bytes of the model's input for such a microbatch
    minibatch   samples in all, where the profile says so
    reserved    bytes of each device that are taken by others: the driver, other programs
    slack       what the device's allocator loses, as a share of what comes and goes
    host        of each device, for what is offloaded; None where that is not known
    most_update bytes that an optimizer step takes at the most, where it steps pieces; None: all layers together
    """

    name: str
    layers: tuple[Layer, ...]
    links: tuple[Link, ...] = ()
    samples: int = 1
    input: int = 0
    minibatch: int | None = None
    reserved: int = 0
    device: str = ""
    slack: float = SLACK
    entry: EntryTime = EntryTime()
    contention: Contention = ALONE
    host: Host | None = None
    most_update: int | None = None

    def scaled(self, samples: int) -> "Profile":
        """The same model with microbatches of another size: what is not overhead grows with it."""
        if samples == self.samples:
            return self
        ratio = samples / self.samples
        layers = tuple(layer.scaled(ratio) for layer in self.layers)
        return replace(self, layers=layers, samples=samples, input=math.ceil(self.input * ratio))

    def with_offloaded_optimizer(self) -> "Profile":
        """The optimizer's state is in the host's memory. Its step brings it through the device in pieces, two of which
        are there at a time; a piece ends with a whole parameter, which is no larger than its layer.
        """
        assert self.host is not None
        parameters, state, workspace = (sum(getattr(each, name) for each in self.layers) for name in _OPTIMIZER)
        piece = PIECE + max(layer.parameters for layer in self.layers)
        most = math.ceil(piece * (2 * state + workspace) / parameters) if parameters else None
        link = Link("host", None, self.host.latency, self.host.bandwidth)
        layers = tuple(
            replace(
                layer,
                optimizer_state=0,
                update_workspace=layer.update_workspace + layer.optimizer_state,
                update=Seconds(layer.update.median + link.seconds(layer.optimizer_state), layer.update.spread),
            )
            for layer in self.layers
        )
        return replace(self, layers=layers, most_update=most)

    def with_step_copies(self) -> "Profile":
        """An optimizer step that does not wait keeps parameters and state as they were, in case it is undone."""
        layers = (
            replace(layer, parameters=2 * layer.parameters, optimizer_state=2 * layer.optimizer_state)
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def link(self, one: int, other: int) -> Link:
        """What connects two devices: the innermost level that has both, or the outermost there is."""
        for link in self.links:
            if link.devices is None or one // link.devices == other // link.devices:
                return link
        return self.links[-1] if self.links else Link("free")
