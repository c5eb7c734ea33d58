"""Where a stage is when a stream has stopped, and who has stopped it."""

from collections.abc import Sequence
from typing import NamedTuple

LEAVES = "was asked to leave"


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
