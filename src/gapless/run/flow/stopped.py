"""Where a stage is when a stream has stopped, and who has stopped it."""

from collections.abc import Sequence
from typing import NamedTuple

LEAVES = "was asked to leave"


class Stopped(NamedTuple):
    """A stage, or a replica of it: the rank that has it, how many updates it has made, if that is known, how many
    minibatches it was fed, and why it has stopped, unless it was told to.
    """

    stage: int
    rank: int
    updated: int | None
    fed: int = 0
    why: str = ""


def is_whole(stages: Sequence[Stopped]) -> bool:
    """All stages have made the same updates."""
    return len({each.updated for each in stages}) == 1 and stages[0].updated is not None


def counts(stages: Sequence[Stopped]) -> str:
    """At which minibatch the model is, or each of its stages, in words."""
    if is_whole(stages):
        return f"the model is at minibatch {stages[0].updated}, and so are all stages"
    several = len({each.stage for each in stages}) < len(stages)
    told = (f"stage {each.stage}{f' on rank {each.rank}' * several} at {_known(each)}" for each in stages)
    return f"the stages have made different updates: {', '.join(told)}"


def _known(stage: Stopped) -> str:
    return str(stage.updated) if stage.updated is not None else f"an unknown one (rank {stage.rank})"
