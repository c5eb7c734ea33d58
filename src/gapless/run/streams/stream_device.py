"""One device of a flow: its stage goes on until nothing more comes, in an order that is known before.

    w forwards, then F B F B ...; after the last backward of a minibatch its update

Each device follows what it is handed: microbatches one way, gradients the other, and at the end of each the word that
nothing more comes. A forward that fails ends the flow there: what is before it is finished everywhere, on both sides.

Where replicas of a stage take turns, a flow may end in the middle of a group: its gradients wait here for the next one.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gapless.errors import note_place
from gapless.guards.between_ranks import STREAM_WEIGHTS
from gapless.run.lanes import Lane, Parcel
from gapless.run.streams.buffer_rollback import BufferRollback
from gapless.run.streams.stage_replicas import Grads, StageReplicas
from gapless.run.streams.updater import Updater
from gapless.run.streams.version_rule import VersionRule
from gapless.stage.batch.plain import sum_in_order
from gapless.stage.shared.weight_versions import Versions
from gapless.stage.stage import Stage


class End:
    """Nothing more comes."""


END = End()


@dataclass(frozen=True)
class Fed:
    """A microbatch as it comes to the first stage and, with its target, to the last one. To others it says that there
    is one.
    """

    inputs: Any
    target: Any
    weight: float
    event: torch.cuda.Event | None = None  # after which it is there, on a GPU

    def unpacked(self, lane: Lane, *, first: bool, last: bool) -> "Fed":
        """What a stage takes of it, as tensors of its lane."""
        inputs, target = (
            lane.unpack(Parcel(tree, self.event, borrowed=True)) if taken else None
            for tree, taken in ((self.inputs, first), (self.target, last))
        )
        return Fed(inputs, target, self.weight)


class Neighbours(Protocol):
    """What a device takes and hands on; `END` instead of it when nothing more comes."""

    def next_part(self) -> Fed | End:
        """The next microbatch."""

    def next_activation(self) -> Any: ...
    def next_gradient(self) -> Any: ...
    def hand_on(self, activation: Any) -> None: ...
    def hand_back(self, gradient: Any) -> None: ...
    def check(self, minibatch: int) -> None:
        """What came of this one belongs together, or it raises."""

    def say(self, minibatch: int, loss: Tensor) -> None: ...
    def settle(self) -> None:
        """Nothing more is handed on or back: takes what still comes, to its end."""


class StreamDevice:
    """One stage on its device. `updated` minibatches have gone into its weights; with replicas, groups of these."""

    def __init__(
        self,
        rule: VersionRule,
        stage: Stage,
        versions: Versions,
        neighbours: Neighbours,
        updater: Updater,
        replicas: StageReplicas,
    ) -> None:
        self.rule, self.stage, self.versions = rule, stage, versions
        self.updater, self._replicas = updater, replicas
        self._over = False  # no other round of the replicas comes
        self.waiting = 0  # minibatches of a group that is not complete, and the gradient of this replica's own
        self.gradient: Grads | None = None
        self.ends = False  # the next flow is the last: a group that is not complete goes into the weights as it is
        self._neighbours = neighbours
        self._first, self._last = rule.stage == 0, rule.stage == rule.stages - 1
        self._begun = self._ended = 0  # microbatches: forwards, and backwards
        self._losses: list[tuple[Tensor, float]] = []
        self._buffers = BufferRollback()
        self._at = ("before its first forward", -1)
        self.idle = False  # it waits for the caller, or for its replicas
        self.is_torn = False  # an update has failed after it had begun: weights and optimizer are between two
        self.update_seconds = 0.0  # of the processor, in all updates
        self.failure: tuple[float, BaseException] | None = None  # and when it came

    def place(self) -> str:
        """What it does, or did last, in words."""
        doing, minibatch = self._at
        return f"at stage {self.rule.stage}, {doing}" + (f" of minibatch {minibatch}" if minibatch >= 0 else "")

    @property
    def updated(self) -> int:
        return self.versions.newest

    @property
    def at(self) -> int:
        """The minibatch that comes next, as the caller counts them: those before it are done."""
        return self.rule.first(self.updated) + self.waiting if self.rule.in_turns else self.updated

    @property
    def next(self) -> int:
        """The same, in minibatches of this replica."""
        return self.updated + (self.gradient is not None)

    def run(self) -> None:
        """Until nothing more comes; then nothing is under way, and another run goes on from there."""
        open_, ahead, neighbours, whole = True, self.rule.ahead, self._neighbours, False
        self._over = False
        self._buffers.begin(self.stage.layers)
        try:
            while open_ or self._begun > self._ended:
                if open_ and self._begun - self._ended <= ahead:
                    open_ = self._forward()
                elif not self._backward():
                    break
            whole = True
        except BaseException as error:  # other devices have made updates that this one never will
            self._failed(error)
        try:
            if open_:
                neighbours.hand_on(END)
            if not self._first:
                neighbours.hand_back(END)
            if not self._over:
                self._meet(make=whole)  # of a group that is not complete this stage makes what its replicas make
            neighbours.settle()
            if self.ends:
                self.rule = self.rule.anew(self.at, self.updated)
        except BaseException as error:
            self._failed(error)
        self._drop_the_rest()

    def _failed(self, error: BaseException) -> None:
        if self.failure is None:
            note_place(error, self.place())
            self.failure = time.monotonic(), error
            self.is_torn = self.is_torn or self.ends  # others have ended a group that this stage has not

    def begin_at(self, start: int, origin: tuple[int, int], waiting: int, gradient: Grads | None) -> None:
        """The versions were restored, of which none is older than `start`: the next minibatch is the newest's, or one
        in the middle of its group.
        """
        self.rule = replace(self.rule, start=start, origin=origin)
        self.waiting, self.gradient = waiting, gradient
        self.is_torn = False
        self._buffers.clear()
        self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        """What is left of a flow that failed: of a minibatch that can't be updated with nothing remains."""
        self.stage.drop()
        self._buffers.put_back(self.next)
        self._losses.clear()
        self._begun, self._ended = (each * self.rule.microbatches for each in (self.next, self.updated))
        for version in self.versions:
            self.versions.grads(version)

    def _forward(self) -> bool:
        """Whether there was one."""
        neighbours, number = self._neighbours, self._begun
        minibatch, place = divmod(number, self.rule.microbatches)
        self.idle = True
        part = neighbours.next_part()
        self.idle = False
        given: Any = END
        if not isinstance(part, End):
            given = part.inputs if self._first else neighbours.next_activation()
        if isinstance(part, End) or given is END:
            neighbours.hand_on(END)
            return False
        self._at = ("in the forward", self.rule.number(minibatch))
        step, of_replica = self.rule.number(minibatch), place
        if not self.rule.in_turns:  # the stage itself counts microbatches of all replicas
            of_replica -= self.rule.replica * self.rule.microbatches
        self.versions.use(self.rule.version(minibatch))
        try:
            if place == 0:
                self._buffers.keep(minibatch)
                neighbours.check(self.rule.counted(minibatch))
            made = self.stage.forward(
                number,
                given,
                step=step,
                place=of_replica,
                target=part.target if self._last else None,
                weight=part.weight,
                want_outputs=False,
                defer=self.stage.split,
                then=None if self._last else neighbours.hand_on,
            )
            if self._last:
                self._note(number, made[1], part.weight)
        except Exception as error:
            self._failed(error)
            neighbours.hand_on(END)
            return False
        self._begun += 1
        return True

    def _note(self, number: int, loss: Tensor, weight: float) -> None:
        self._losses.append((loss, weight))
        minibatch, place = divmod(number, self.rule.microbatches)
        if place == self.rule.microbatches - 1:
            total = sum_in_order(*zip(*self._losses, strict=True))
            if total.is_cuda:  # others know nothing of this stream; the update that comes next waits as well
                torch.cuda.current_stream(total.device).synchronize()
            self._neighbours.say(self.rule.counted(minibatch), total)
            self._losses.clear()

    def _backward(self) -> bool:
        """Whether there was one: where a later stage has failed, the rest has no gradient."""
        number, neighbours = self._ended, self._neighbours
        minibatch, place = divmod(number, self.rule.microbatches)
        if self.gradient is not None:  # from an earlier flow
            self._ended += 1
            self._meet()
            return not self._over
        grads = None if self._last else neighbours.next_gradient()
        if grads is END:
            return False
        self._at = ("in the backward", self.rule.number(minibatch))
        self.versions.use(self.rule.version(minibatch))  # a recompute, or a hook, looks for the weights of its forward
        self.stage.backward(number, grads, None if self._first else neighbours.hand_back)
        self._ended += 1
        if place == self.rule.microbatches - 1:
            self._update(minibatch)
        return not self._over

    def _update(self, minibatch: int) -> None:
        versions, began = self.versions, time.thread_time()
        self._at = ("in the update", self.rule.number(minibatch))
        assert versions.newest == minibatch
        versions.check_forwards(self.rule.version(minibatch))
        self.gradient = versions.grads(self.rule.version(minibatch))
        for parameter in versions.parameters:
            if parameter.grad is not None:
                raise STREAM_WEIGHTS.refusal(
                    "a parameter has got a gradient that belongs to no version of it",
                    "let nothing but the layers of a stage use its weights while a stream runs",
                )
        self.update_seconds += time.thread_time() - began
        self._meet()

    def _meet(self, *, make: bool = True) -> None:
        """The next round of the replicas, and the update that it gives."""
        self.idle = True
        mean, self._over, self.waiting = self._replicas.meet(self.gradient, ends=self.ends)
        self.idle = False
        if mean is not None or self.rule.replica >= self.waiting:
            self.gradient = None
        if mean is not None and make:
            end = self.at
            self._make(self.updated, mean)
            if self.waiting:
                self.waiting, self.rule = 0, self.rule.anew(end, self.updated)

    def _make(self, minibatch: int, grads: Grads) -> None:
        versions, began = self.versions, time.thread_time()
        oldest = self.rule.version(minibatch + 1)  # from it on each one has its users, under way or to come
        self.updater.check(minibatch, dict(zip(versions.parameters, grads, strict=True)))
        self.is_torn = True
        versions.forget(oldest)
        keep = versions.newest >= oldest
        versions.update(grads, self.updater.step, keep=keep, predict=self.updater.predict)
        self.is_torn = False
        self.stage.finish(resting=False)
        self._buffers.forget(minibatch)
        self.update_seconds += time.thread_time() - began
