"""What a stream asks of the processes that its devices are in, and what they say when it has stopped: where each stage
is then, and who has stopped it.
"""

import queue
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gapless.run.streams.stream_device import End, Fed, StreamDevice

LEAVES = "was asked to leave"
Said = queue.SimpleQueue[tuple[int, Tensor | None]]  # minibatch and loss, in order; None: nothing more is said


class Stopped(NamedTuple):
    """A stage, or a replica of it: the rank that has it, how many updates it has made, if that is known, how many
    minibatches it was fed, why it has stopped, unless it was told to, and whether its next update is half made.
    """

    stage: int
    rank: int
    updated: int | None
    fed: int = 0
    why: str = ""
    is_torn: bool = False


class StreamRunner(Protocol):
    """What runs the devices of this process, and reaches the others."""

    said: Said

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """All processes are about to do the same. Raises the error, and on the others that there is one."""

    def compare(self, minibatch: int, batch: Any) -> None:
        """What is fed next is a part of this batch, which should be the same in all processes."""

    def feed(self, part: Fed | End) -> None:
        """The next microbatch, or that there is none."""

    def start(self, devices: Sequence[StreamDevice]) -> None:
        """All devices begin."""

    def hear(self) -> tuple[int, Tensor | None]:
        """Waits for what is said next."""

    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of all stages, and says where they are. This process was fed so many minibatches; `why`
        tells others why it stops, if it was not asked to.
        """

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """With what all processes have of it."""

    def broken_off(self) -> Sequence[Stopped]:
        """Where all stages are, as far as it is known, where `finish` has failed."""


def is_whole(stages: Sequence[Stopped]) -> bool:
    """All stages have made the same updates, and each of them wholly."""
    known = {each.updated for each in stages}
    return len(known) == 1 and None not in known and not any(each.is_torn for each in stages)


def counts(stages: Sequence[Stopped]) -> str:
    """At which minibatch the model is, or each of its stages, in words."""
    if is_whole(stages):
        return f"the model is at minibatch {stages[0].updated}, and so are all stages"
    several = len({each.stage for each in stages}) < len(stages)
    told = (f"stage {each.stage}{f' on rank {each.rank}' * several} at {_known(each)}" for each in stages)
    what = (
        "an update is half made" if any(each.is_torn for each in stages) else "the stages have made different updates"
    )
    return f"{what}: {', '.join(told)}"


def _known(stage: Stopped) -> str:
    if stage.updated is None:
        return f"an unknown one (rank {stage.rank})"
    return f"{stage.updated} and a part of the next" if stage.is_torn else str(stage.updated)
