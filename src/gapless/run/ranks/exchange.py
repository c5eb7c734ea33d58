"""The gradients of a step and the other replicas: what is set aside, when the sums start, and what waits for later.

    begin      what was exchanged before this step is set aside
    finished   a stage's last gradient is there: its sum starts, while other stages still work
    end        all sums are there; or, without `sync`, gradients stay for a later step to exchange

FSDP's modules exchange their gradients themselves, and are told when.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from gapless.guards.between_ranks import UNEXCHANGED_GRADIENTS
from gapless.run.given_batch import Batch
from gapless.run.ranks.replicas import Buckets, Shares
from gapless.run.ranks.sharded import Sharded
from gapless.run.ranks.wire.call_stamp import Call
from gapless.schedule.action import BACKWARDS, Action, Kind
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.share import Share
from gapless.stage.shared.tie import Tie
from gapless.stage.stage import Stage

_SHARED = -1
_LAST_GRADIENTS = (BACKWARDS - {Kind.INPUT_GRAD}) | {Kind.WEIGHT_GRAD}


class Pending:
    """The steps since the last exchange, because they said `sync=False`, and the weights as they were then.

    Each replica has its own gradients until a step exchanges them. An optimizer that uses them earlier makes the
    replicas' weights differ, and nothing fails: it is noticed by the weights, which must not change meanwhile.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._versions: list[tuple[nn.Parameter, int]] = []

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """One more step without an exchange; these are the weights that it has used."""
        self.steps += 1
        self.note(parameters)

    def note(self, parameters: Iterable[nn.Parameter]) -> None:
        """The weights are rightly what they are."""
        if self.steps:
            self._versions = [(parameter, parameter._version) for parameter in parameters]

    def clear(self) -> None:
        self.steps, self._versions = 0, []

    def check_weights(self) -> None:
        """Raises if somebody has changed the weights since."""
        changed = sum(parameter._version != version for parameter, version in self._versions)
        if changed:
            raise UNEXCHANGED_GRADIENTS.refusal(
                f"{changed} of {len(self._versions)} parameters changed after {self._words()}, before the replicas "
                "exchanged gradients, so their weights differ now",
                "load them again, and make the last step before optimizer.step() one with sync=True",
            )

    def check_nothing(self, call: str) -> None:
        """Raises if a call needs gradients that are complete."""
        if self.steps:
            raise UNEXCHANGED_GRADIENTS.refusal(
                f"{call} came after {self._words()}, whose gradients the replicas have not exchanged yet"
            )

    def _words(self) -> str:
        return f"{self.steps} step{'s' if self.steps > 1 else ''} with sync=False"


class Exchange:
    """Of one rank. `replicas` is its group of replicas, `sums` the one in which gradients are added; `courier` starts
    the sums of a CPU, while a GPU posts them to its stream.
    """

    def __init__(
        self, replicas: Any = None, sums: Any = None, ranks: Sequence[int] = (), replica: int = 0, courier: Any = None
    ) -> None:
        self._replicas, self._sums, self._courier = replicas, sums, courier
        self._ranks, self._replica = ranks, replica
        self.share, self.pending = Share(), Pending()
        self.parameters: list[nn.Parameter] = []  # of this rank
        self._shares: Shares | None = None  # of this step's microbatches
        self._sharded = Sharded({})
        self._buckets: dict[int, Buckets] = {}  # by stage; the last is of parameters that stages share
        self._due: list[int] = []
        self._ended: set[int] = set()

    def adopt(self, stages: Mapping[int, Stage], ties: Sequence[Tie]) -> None:
        """These stages are here. Gradients that wait for an exchange are kept."""
        self._sharded = Sharded(stages)
        self.parameters = list(dict.fromkeys(each for stage in stages.values() for each in stage.parameters()))
        if self._replicas is None:
            return
        for stage in stages.values():
            stage.sum_later()
        shared = {each.parameter for each in ties}
        earlier = list(self._buckets.values()) if self.pending.steps else []
        self._buckets = {
            number: Buckets(self._sums, [each for each in stage.parameters() if each not in shared], earlier)
            for number, stage in sorted(stages.items(), reverse=True)
        }
        self._buckets[_SHARED] = Buckets(self._sums, [each.parameter for each in ties if each.is_home], earlier)

    def weights(self, counted: Weighed, most_microbatches: int, share: Share, call: Call) -> Sequence[float]:
        """The share of each microbatch in the minibatch of all replicas."""
        self.share, self._shares = share, None
        if self._replicas is not None:
            self._shares = Shares(self._replicas, self._ranks, self._replica, counted, most_microbatches, share, call)
            return self._shares
        counted.check_kept()
        return share.shares(counted.numbers, sum(counted.numbers), summed=counted.summed)

    def begin(self) -> None:
        """A step starts."""
        self._sharded.begin()
        self._due, self._ended = [stage for stage in self._buckets if stage != _SHARED], set()
        for buckets in self._buckets.values():
            buckets.begin()

    def after(self, row: Iterable[Action]) -> dict[Action, Callable[[Batch], None]]:
        """The gradients of a stage go to all replicas after the last of these actions that makes some."""
        last = {action.stage: action for action in row if action.kind in _LAST_GRADIENTS}
        return {action: lambda _, stage=stage: self.finished(stage) for stage, action in last.items()}  # type: ignore[misc]

    def finished(self, stage: int) -> None:
        """The last weight gradient of a stage is there. Sums start in one order on all replicas, whatever their
        schedules.
        """
        self._sharded.finish(stage, sync=self.share.sync)
        self._ended.add(stage)
        while self.share.sync and self._due and self._due[0] in self._ended:
            buckets = self._buckets[self._due.pop(0)]
            if self._courier is not None:
                self._courier.put((self._start, buckets))
            else:
                self._start(buckets)  # posted to the stream that has made them

    def _start(self, buckets: Buckets) -> None:
        if self._shares is not None:
            self._shares.everywhere()  # all replicas are in this step
        buckets.start()

    def end(self, flush: Any) -> bool:
        """Whether all gradients are the sums of all replicas now. `flush` waits until the sums have started."""
        if self._shares is not None:
            self._shares.everywhere()  # all replicas mean the same
            if not self.share.sync:
                for buckets in self._buckets.values():
                    buckets.keep()
                self.pending.add(self.parameters)
                return False
        if self._buckets:
            flush()
            self._buckets[_SHARED].start()
        for buckets in self._buckets.values():
            buckets.finish()
        self.pending.clear()
        return True

    def give_up(self) -> None:
        """The step has failed: gradients are those from before."""
        self.pending.clear()
        self._sharded.release()
        for buckets in self._buckets.values():
            buckets.give_up()

    def release(self) -> None:
        """An evaluation is over."""
        self._sharded.release()

    def drop(self) -> None:
        """Gradients that wait for an exchange are not wanted any more."""
        if self.pending.steps:
            self._sharded.drop()
            for buckets in self._buckets.values():
                buckets.drop()
        self.pending.clear()
