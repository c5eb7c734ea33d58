"""What a stream asks of the processes that its devices are in."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from gapless.run.flow.device import End, Fed, FlowDevice
from gapless.run.flow.stopped import Stopped
from gapless.run.flow.stream_state import State
from gapless.run.flow.threads import Said


class Flow(Protocol):
    """What runs the devices of this process, and reaches the others."""

    said: Said

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """All processes are about to do the same. Raises the error, and on the others that there is one."""

    def compare(self, minibatch: int, batch: Any) -> None:
        """What is fed next is a part of this batch, which should be the same in all processes."""

    def feed(self, part: Fed | End) -> None:
        """The next microbatch, or that there is none."""

    def start(self, devices: Sequence[FlowDevice]) -> None:
        """All devices begin."""

    def hear(self) -> tuple[int, Tensor | None]:
        """Waits for what is said next."""

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of all stages, and says where they are. This process was fed so many minibatches; `why`
        tells others why it stops, if it was not asked to.
        """

    def gathered(self, state: State) -> State:
        """With what all processes have of it."""

    def broken_off(self) -> Sequence[Stopped]:
        """Where all stages are, as far as it is known, where `finish` has failed."""
