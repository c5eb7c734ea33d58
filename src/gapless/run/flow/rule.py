"""Which version of its weights a stage uses for which minibatch. The clock has no say in it.

Minibatches m = 0, 1, ..., stages r = 0..K-1; update m makes version m + 1.

    stashing        max(0, m - (K-1-r))    every stage the newest there is when its schedule lets it begin
    vertical sync   max(0, m - (K-1))      every stage what the minibatch met at the first
    2bw             max(0, m - 1)          always one behind

A stream that starts anew at minibatch n, without the versions from before, has max(n, ...) in place of max(0, ...).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """For stage `stage` of `stages`, with minibatches of `microbatches`."""

    kind: Literal["stashing", "vertical", "2bw"]
    stage: int
    stages: int
    microbatches: int = 1
    start: int = 0  # the oldest version there is
    replicas: int = 1  # of the stage; this one has every so many-th minibatch, and m above counts its own
    replica: int = 0

    def number(self, minibatch: int) -> int:
        """Of this replica's minibatch among those of all."""
        return minibatch * self.replicas + self.replica

    @property
    def ahead(self) -> int:
        """How many forwards come before the first backward, in microbatches."""
        return self.stages - 1 - self.stage

    @cached_property
    def delay(self) -> int:
        """How many updates come between the version that a minibatch uses and the one that it updates."""
        return {"stashing": self.ahead, "vertical": self.stages - 1, "2bw": 1}[self.kind]

    def version(self, minibatch: int) -> int:
        """What minibatch `minibatch` uses."""
        return max(self.start, minibatch - self.delay)

    @property
    def most_versions(self) -> int:
        """That there are at once."""
        return self.delay + 1
