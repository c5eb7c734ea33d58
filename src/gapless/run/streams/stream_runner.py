"""What a stream asks of the processes that its devices are in, and what they say when it has stopped: where each stage
is then, and who has stopped it.
"""

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from gapless.errors import TransportError
from gapless.guards.between_ranks import STREAM_ENDS
from gapless.run.lanes import Lane, fenced
from gapless.run.streams.stream_device import END, End, Fed, StreamDevice
from gapless.run.team import Task, Team

Made = TypeVar("Made")
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


class StreamRunner(ABC):
    """What runs the devices of this process, and reaches the others, if there are any."""

    def __init__(self, lanes: Sequence[Lane], team: Team) -> None:
        self._lanes, self._team = lanes, team
        self.said: Said = queue.SimpleQueue()
        self._fence = ExitStack()

    def meet(self, facts: Mapping[str, Any], error: Exception | None) -> None:
        """All processes are about to do the same. Raises the error, and on the others that there is one."""
        if error is not None:
            raise error

    @abstractmethod
    def compare(self, minibatch: int, batch: Any) -> None:
        """What is fed next is a part of this batch, which should be the same in all processes."""

    @abstractmethod
    def feed(self, part: Fed | End) -> None:
        """The next microbatch, or that there is none."""

    @abstractmethod
    def start(self, devices: Sequence[StreamDevice]) -> None:
        """All devices begin. They run until `END` was fed and nothing is under way, or one fails."""

    def _begin(self, tasks: Iterable[Task]) -> None:
        """One for each lane, after what the caller has queued."""
        self._fence.enter_context(fenced(self._lanes))
        self._team.flows = True
        self._team.begin(tasks, lambda: self.feed(END))

    def hear(self) -> tuple[int, Tensor | None]:
        """Waits for what is said next."""
        return self.said.get()

    @abstractmethod
    def finish(self, fed: int, why: str) -> Sequence[Stopped]:
        """Waits for the end of all stages, and says where they are. This process was fed so many minibatches; `why`
        tells others why it stops, if it was not asked to.
        """

    def _end(self) -> None:
        """All tasks have ended, and what the caller queues next comes after what they have queued."""
        self._team.finish()
        self._team.flows = False
        self._fence.close()

    def gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """With what all processes have of it."""
        return state

    @abstractmethod
    def broken_off(self) -> Sequence[Stopped]:
        """Where all stages are, as far as it is known, where `finish` has failed."""


def met(
    runner: StreamRunner, make: Callable[[], Made], facts: Callable[[Made], Mapping[str, Any]] = lambda _: {}
) -> Made:
    """What is made here, once all processes have made theirs: what can't be made is of one stage, and others wait."""
    made, fault = [], None
    try:
        made.append(make())
    except Exception as error:
        fault = error
    runner.meet(facts(made[0]) if made else {}, fault)
    return made[0]


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


def why_stopped(
    stages: Sequence[Stopped], failures: Sequence[tuple[float, BaseException]], why: str, ranks: int
) -> BaseException | None:
    """What is raised where a stream has stopped: what has failed here, or else why it has done so earlier than it was
    asked to. `why`, if the caller's own error has stopped it, which is raised anyway. So many ranks have one loader.
    """
    whys, feds = [each.why for each in stages if each.why], [each.fed for each in stages]
    if failures:
        _, error = min(failures, key=lambda failure: failure[0])
        error.add_note(f"gapless: {counts(stages)}")
        return error
    if whys and why:
        return None
    if any(each.endswith(LEAVES) for each in whys):  # and all do
        left = SystemExit(0)
        left.add_note(f"gapless: {counts(stages)}")
        return left
    if whys:
        return TransportError(f"the stream has stopped, since {whys[0]}: {counts(stages)}")
    # Ranks of one pipeline were fed different numbers of minibatches, or replicas more than a group can lack.
    rows = [set(feds[start : start + ranks]) for start in range(0, len(feds), ranks)]
    if all(len(row) == 1 for row in rows) and max(feds) - min(feds) <= 1:
        return None
    least, most = (choose(stages, key=lambda each: each.fed) for choose in (min, max))
    return STREAM_ENDS.refusal(
        f"rank {least.rank} has ended the stream after {least.fed} minibatches and rank {most.rank} after "
        f"{most.fed}, and {counts(stages)}"
    )
