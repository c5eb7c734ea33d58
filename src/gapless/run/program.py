"""A schedule bound to stages: a device's actions become a flat list of calls once, and are then just run.

Each call takes what it needs (from the batch, from a stage on the same device, or from a channel), computes, and
hands the result on. No decision is taken and nothing is looked up by name while a step runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gapless.run.channels import Transport
from gapless.run.copy_waits import after_copies
from gapless.run.given_batch import Batch
from gapless.run.lanes import CpuLane, Lane, Parcel
from gapless.schedule.action import BACKWARDS, COPIES, Action, Kind, Schedule
from gapless.schedule.asynchronous.updates import WEIGHT_GRADIENTS
from gapless.schedule.asynchronous.verdicts import messages_ahead
from gapless.schedule.costs import Costs
from gapless.schedule.dependencies import completes, dependencies
from gapless.schedule.routes import Channel, Routes
from gapless.schedule.verify import is_in_order
from gapless.stage.batch.loss_counts import check_scalar
from gapless.stage.split.ordered_accumulation import Turns
from gapless.stage.stage import Stage

Call = Callable[[], object]


class Program:
    """One schedule bound to stages and lanes: per device the calls, and the action each belongs to.

    `here` are the devices that this process runs, `stages` those on them by their numbers. `after` has what is to be
    called when an action has ended. `costs` tell when copies to the host should have ended.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, Stage],
        lanes: Sequence[Lane],
        loss: Callable[[Any, Any], Tensor | None],
        channels: Transport,
        *,
        here: Sequence[int],
        recorded: bool,
        after: Mapping[Action, Callable[[Batch], None]] | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.schedule, self.stages, self.lanes, self.loss = schedule, stages, lanes, loss
        self.batch = Batch()
        self.channels, self.here = channels, here
        self._routes = Routes(schedule.placement)
        self.inference = schedule.kinds == {Kind.FORWARD}
        self.marks: list[list[Any]] = [[] for _ in schedule.rows]
        self.recorded = recorded
        self._one_memory = all(isinstance(lane, CpuLane) for lane in lanes)  # what is made is where it is needed
        self.reached = [0] * schedule.num_devices  # the position of the action each device has begun last
        self.stopping: list[bool] = []  # not empty: every device is to stop before its next action
        self._local: dict[tuple[str, int, int], Any] = {}  # handed from a stage to another one of the same device
        # A backward that runs whole needs no deferral, even where the same stage splits others.
        self._deferred = {action for row in schedule.rows for action in row if action.kind is Kind.WEIGHT_GRAD}
        self._after = after or {}
        self.at_verdict: Callable[[int], None] = lambda device: None  # of the update before
        ordered = partial(is_in_order, schedule)
        self._turns = {
            stage: Turns(work.own_parameters, schedule.num_microbatches)
            for stage, work in stages.items()
            if not (ordered(stage, BACKWARDS) and ordered(stage, WEIGHT_GRADIENTS))
        }
        for stage, work in stages.items():
            work.forwards_in_order = ordered(stage, {Kind.FORWARD})
            work.compute_alone(len(here) == 1)
        self._following = {device: dict(pairwise(schedule.rows[device])) for device in here}
        self.calls = {device: self._bind(device, costs) for device in here}

    def _bind(self, device: int, costs: Costs | None) -> list[Call]:
        there: set[Action] = set()
        for action in self.schedule.rows[device]:  # ours to be right about: what is needed locally comes before
            for need in dependencies(action, self.schedule):
                home = self.schedule.placement.device(need.stage, need.microbatch)
                assert home != device or need in there, f"{action} before {need} on device {device}"
            there.update(completes(action))
        calls = [self._call(device, action) for action in self.schedule.rows[device]]
        for position, action in enumerate(self.schedule.rows[device]):
            if action in self._after:
                calls[position] = self._followed(calls[position], self._after[action])
        ahead = self.schedule.has_copies and not self._one_memory
        return after_copies(calls, self.schedule, costs, device, self.stages) if ahead else calls

    def _call(self, device: int, action: Action) -> Call:
        stage, kind, microbatch = action
        work = self.stages[stage]
        if kind is Kind.FORWARD:
            take, put = self._taker(device, action), self._putter(device, action)
            compute = self._forward(stage, microbatch, put)
        elif kind in BACKWARDS:
            take, put = self._taker(device, action), self._putter(device, action)
            half = work.backward if kind is Kind.BACKWARD else work.backward_input
            if (turns := self._turns.get(stage)) is not None:
                half = _in_turn(turns, half, last=Action(stage, Kind.WEIGHT_GRAD, microbatch) not in self._deferred)
            compute = lambda grads: half(microbatch, grads, put)  # noqa: E731
        elif kind is Kind.VERDICT:
            take, compute = None, lambda _: self.at_verdict(device)
        else:
            alone = self._alone(device, action)
            if kind is Kind.WEIGHT_GRAD and (turns := self._turns.get(stage)) is not None:
                alone = partial(turns.taken, microbatch, alone, last=True)
            if not self.recorded:
                return alone
            take, compute = None, lambda _: alone()
        if self.recorded:
            compute = self._timed(device, kind, compute)
        elif kind in BACKWARDS and take is not None:
            return lambda: half(microbatch, take(), put)  # the same without a call between
        return (lambda: compute(None)) if take is None else (lambda: compute(take()))

    def _alone(self, device: int, action: Action) -> Call:
        """What has to do with no other stage."""
        stage, kind, microbatch = action
        work = self.stages[stage]
        if kind in COPIES:
            return partial(work.offload if kind is Kind.OFFLOAD else work.load, microbatch, self.lanes[device].link)
        assert kind in (Kind.WEIGHT_GRAD, Kind.RECOMPUTE), f"{action} is no action of a synchronous step"
        return partial(work.backward_weight if kind is Kind.WEIGHT_GRAD else work.recompute, microbatch)

    def _followed(self, call: Call, then: Callable[[Batch], None]) -> Call:
        def run() -> None:
            call()
            then(self.batch)

        return run

    def _forward(self, stage: int, microbatch: int, put: Callable[[Any], None] | None) -> Callable[[Any], Any]:
        work, batch = self.stages[stage], self.batch
        last = stage == self.schedule.num_stages - 1
        if self.inference:
            return self._infer_last(work, microbatch) if put is None else lambda inputs: put(work.infer(inputs))
        defer = Action(stage, Kind.WEIGHT_GRAD, microbatch) in self._deferred
        keep = work.remat == "stage" and (stage, microbatch) not in self.schedule.recomputed
        leaves = (stage, microbatch) in self.schedule.offloaded
        if not last:
            return lambda inputs: work.forward(
                microbatch, inputs, step=batch.step, defer=defer, keep=keep, leaves=leaves, then=put
            )

        lane = self.lanes[self.schedule.placement.device(stage, microbatch)]

        def forward(inputs: Any) -> None:
            batch.outputs[microbatch], batch.losses[microbatch] = work.forward(
                microbatch,
                inputs,
                step=batch.step,
                target=_given(lane, batch.targets[microbatch]),
                weight=batch.weights[microbatch],
                want_outputs=batch.want_outputs,
                defer=defer,
                keep=keep,
                leaves=leaves,
            )

        return forward

    def _infer_last(self, work: Stage, microbatch: int) -> Callable[[Any], None]:
        batch, loss = self.batch, self.loss
        lane = self.lanes[self.schedule.placement.device(self.schedule.num_stages - 1, microbatch)]

        def infer(inputs: Any) -> None:
            outputs = work.infer(inputs)
            batch.outputs[microbatch] = outputs
            if batch.targets:
                target = batch.targets[microbatch]
                with torch.no_grad():
                    value = loss(outputs, _given(lane, target))
                if target is not None:
                    check_scalar(value)
                batch.losses[microbatch] = value

        return infer

    def _taker(self, device: int, action: Action) -> Callable[[], Any] | None:
        """What brings an action its input: from another stage, or from the batch for the first forward."""
        microbatch, lane, batch = action.microbatch, self.lanes[device], self.batch
        route = self._routes.arriving(action)
        if route is None and action.kind is Kind.FORWARD:
            return lambda: _given(lane, batch.inputs[microbatch])
        if route is None:
            return None
        if not route.crosses:
            local, key = self._local, (route.channel[2], route.source, microbatch)
            return lambda: local.pop(key)
        receive, unpack = self.channels.receiver(route.channel), lane.unpack
        return receive if self._as_it_is(route.channel) else lambda: unpack(receive())

    def _putter(self, device: int, action: Action) -> Callable[[Any], None] | None:
        route = self._routes.leaving(action)
        if route is None:
            return None
        if not route.crosses:
            local, key = self._local, (route.channel[2], route.source, action.microbatch)
            return lambda result: local.__setitem__(key, result)
        send = self.channels.sender(route.channel, idle=self._waits_after(device, action))
        pack = self.lanes[device].pack
        return send if self._as_it_is(route.channel) else lambda result: send(pack(result))

    def _as_it_is(self, channel: Channel) -> bool:
        return self._one_memory or self.channels.in_stream(channel)

    def _waits_after(self, device: int, action: Action) -> bool:
        """Whether what this device does next needs something from another one."""
        following = self._following[device].get(action)
        if following is None:
            return True
        route = self._routes.arriving(following)
        return route is not None and route.crosses

    def _timed(self, device: int, kind: Kind, compute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        link, now, marks = self.lanes[device].link, self.lanes[device].now, self.marks[device]

        def timed(argument: Any) -> Any:
            start = now()
            result = compute(argument)
            end = now()
            # At a verdict a device waits.
            marks.append(link.last if kind in COPIES else (end if kind is Kind.VERDICT else start, end))
            return result

        return timed

    def give(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        weights: Sequence[float | Tensor] = (),
        *,
        step: int = 0,
        want_outputs: bool = False,
    ) -> None:
        """What the next run works on, each per microbatch."""
        batch, count = self.batch, self.schedule.num_microbatches
        batch.inputs, batch.targets, batch.weights = inputs, targets, weights
        batch.step, batch.want_outputs = step, want_outputs
        batch.outputs, batch.losses = [None] * count, [None] * count

    @property
    def losses(self) -> tuple[Tensor, ...]:
        """Those that the last run has found here."""
        return tuple(loss for loss in self.batch.losses if loss is not None)

    def drop_forwards(self, device: int) -> None:
        """Those before the verdict of a device, which will run again."""
        self.channels.drain(messages_ahead(self.schedule, device))
        for stage in self.schedule.placement.stages[device]:
            self.stages[stage].drop(resting=False)
            for key in [key for key in self._local if key[1] == stage]:
                del self._local[key]
        self.marks[device].clear()

    def run_forwards(self, device: int) -> None:
        """Those before the verdict of a device, once more."""
        for call, action in zip(self.calls[device], self.schedule.rows[device], strict=True):
            if action.kind is Kind.VERDICT:
                return
            call()

    def stop(self) -> None:
        """Every device stops before its next action; those that wait are woken."""
        self.stopping.append(True)
        self.channels.stop()

    def clear(self) -> None:
        """Nothing of the last step is left, whether it ended well or not."""
        self.batch.inputs = self.batch.targets = self.batch.weights = self.batch.weights_after_overflow = ()
        self.batch.outputs, self.batch.losses = [], []
        for marks in self.marks:
            marks.clear()

    def forget(self) -> None:
        """Whatever a step that failed or was interrupted has left under way."""
        self.stopping.clear()
        self.channels.clear()
        self._local.clear()
        for turns in self._turns.values():
            turns.clear()
        for stage in self.stages.values():
            stage.drop()


def _given(lane: Lane, value: Any) -> Any:
    """What the caller has made, as the lane needs it."""
    if type(value) is Tensor and value.is_cpu and lane.device.type == "cpu":
        return value
    return lane.unpack(Parcel(value, borrowed=True))


def _in_turn(turns: Turns, half: Callable[..., Any], *, last: bool) -> Callable[..., Any]:
    return lambda microbatch, *args: turns.taken(microbatch, lambda: half(microbatch, *args), last=last)
