"""Which version of its weights a stage uses for which minibatch. The clock has no say in it.

Minibatches m = 0, 1, ..., stages r = 0..K-1; update m makes version m + 1.

    stashing        max(0, m - (K-1-r))    every stage the newest there is when its schedule lets it begin
    vertical sync   max(0, m - (K-1))      every stage what the minibatch met at the first
    2bw             max(0, m - 1)          always one behind

A stage may have replicas. Then an update takes a group of as many minibatches, one of each, and m counts groups above.
They come from a loader of each replica, or all from one loader, and the replicas take turns:

    stage 0 on three replicas   | 0 1 2 | 3 4 5 | 6 ...       its updates take three minibatches each,
    stage 1 on one              | 0 | 1 | 2 | 3 | 4 ...       those of this one a minibatch

A stream that starts anew at minibatch n, without the versions from before, has max(n, ...) in place of max(0, ...).
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class VersionRule:
    """For stage `stage` of `stages`, with minibatches of `microbatches`. `ahead`: how many forwards come before the
    first backward, in microbatches.
    """

    kind: Literal["stashing", "vertical", "2bw"]
    stage: int
    stages: int
    ahead: int
    microbatches: int = 1
    start: int = 0  # the oldest version there is
    replicas: int = 1  # of the stage; this one has every so many-th minibatch, and m above counts its own
    replica: int = 0
    turns: tuple[int, ...] = ()  # the replicas of all stages, where these take turns in the minibatches of one loader
    origin: tuple[int, int] = (0, 0)  # a minibatch and a group: that of this stage that began with that minibatch

    @property
    def in_turns(self) -> bool:
        """Or each replica has a loader of its own."""
        return bool(self.turns)

    def number(self, group: int) -> int:
        """Of this replica's minibatch among those of all."""
        return self.first(group) + self.replica

    def first(self, group: int) -> int:
        """The first minibatch of a group."""
        minibatch, earlier = self.origin
        return minibatch + (group - earlier) * self.replicas

    def counted(self, group: int) -> int:
        """This replica's minibatch as its caller counts them, in its own loader or in that of all."""
        return self.number(group) if self.in_turns else group

    def shown(self, minibatch: int) -> int:
        """What a caller has counted, among those of all loaders."""
        return minibatch if self.in_turns else self.number(minibatch)

    def anew(self, minibatch: int, group: int) -> "VersionRule":
        """Groups are counted from here on: this one begins with that minibatch, at this stage."""
        return replace(self, origin=(minibatch, group))

    @cached_property
    def delay(self) -> int:
        """How many updates come between the version that a minibatch uses and the one that it updates."""
        return {"stashing": self.ahead, "vertical": self.stages - 1, "2bw": 1}[self.kind]

    @property
    def longest_delay(self) -> int:
        """Of any stage, where each has as many replicas."""
        return 1 if self.kind == "2bw" else self.stages - 1

    def version(self, minibatch: int) -> int:
        """What minibatch `minibatch` uses."""
        return max(self.start, minibatch - self.delay)
