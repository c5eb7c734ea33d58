"""One process per device: what a pipeline under a mesh does with the other ranks, apart from handing tensors on."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapless.errors import ConfigError, TransportError
from gapless.model.uses import Uses, tie, uses_of
from gapless.run.channels import Transport
from gapless.run.clip import clip_everywhere
from gapless.run.lanes import make_lane
from gapless.run.program import Batch, Program
from gapless.run.ranks.agreement import Agreement
from gapless.run.ranks.clock import SharedClock
from gapless.run.ranks.link_speed import Hop, measure_hops
from gapless.run.ranks.ownership import Homes
from gapless.run.ranks.pending import Pending
from gapless.run.ranks.replicas import Buckets, Shares, check_same, gathered, same_everywhere
from gapless.run.ranks.sameness import Sameness
from gapless.run.ranks.seat import Seat, facts_of, make_groups
from gapless.run.ranks.sharded import Sharded
from gapless.run.ranks.shared_parameter import Holders
from gapless.run.ranks.state_dict import gather, held, load
from gapless.run.ranks.stragglers import Pace, Row, planned_work
from gapless.run.ranks.watch.blame import is_lost
from gapless.run.ranks.watch.children import keep_for_ever, tell_in_child
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire import nccl
from gapless.run.ranks.wire.channel import Courier
from gapless.run.ranks.wire.connections import Connections, RankChannels, connect_all
from gapless.run.ranks.wire.groups import connected, network_device, part_of_store
from gapless.schedule.action import BACKWARDS, Action, Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.timeline import Timeline
from gapless.stage.counted import Weighed
from gapless.stage.share import Share
from gapless.stage.stage import Stage
from gapless.stage.tie import Tie, Tied

_LAST_GRADIENTS = (BACKWARDS - {Kind.INPUT_GRAD}) | {Kind.WEIGHT_GRAD}


class Ranks:
    """This rank's device, and its connections to the others."""

    def __init__(self, seat: Seat, timeout: float) -> None:
        self.seat = seat
        self.devices = [self.seat.torch_device] * self.seat.num_devices
        self.lanes = [make_lane(self.seat.torch_device)] * self.seat.num_devices
        self.here: Sequence[int] = (self.seat.device,)
        self.tied: Tied = "summed"
        network, rank = network_device(), dist.get_rank()
        store = part_of_store("agreement", sorted(self.seat.ring))
        self._agreement = Agreement(store, self.seat.ring, rank, timeout)
        self._agreement.reach(facts_of(seat.mesh), lambda: None)
        self._process = os.getpid()
        tell_in_child(self)
        self._watch = Watch(self.seat.ring, rank, partial(connected, network=network), timeout)
        with ExitStack() as opened:  # if what follows fails, nobody is to believe that this rank lives on
            opened.push(self._could_not_connect)
            self._groups = make_groups(self.seat, network)
            self._sums = self._groups.dp  # of gradients
            self._courier = Courier(self._groups.pp, f"gapless device {self.seat.device}", self._failed)
            opened.callback(self._courier.close, lambda: True)
            self._links = self._connect()
            opened.pop_all()
        self._whereabouts = self._watch.whereabouts
        self._whereabouts.connections = self._links
        self._watch.break_off = self._break_off
        self._pace = Pace(self._rows())
        self._sameness = Sameness(self.seat, self._groups.pp, self._groups.dp)
        self._planned: dict[tuple[int, bool], float] = {}  # by the number of microbatches, and whether it only infers
        self._homes = Homes(self.seat.device)
        self._holders: list[tuple[nn.Parameter, Holders]] = []
        self._sharded = Sharded({})
        self._parameters: list[nn.Parameter] = []
        self._shares: Shares | None = None  # of this step's microbatches
        self._buckets: dict[int, Buckets] = {}  # by stage; the last is of parameters that stages share
        self._part, self._pending = Share(), Pending()
        self._due: list[int] = []
        self._ended: set[int] = set()
        self._clock: SharedClock | None = None

    def _connect(self) -> Connections:
        seat, gpu = self.seat, self.seat.torch_device if self.seat.torch_device.type != "cpu" else None
        direct = gpu is not None and nccl.is_used(seat.mesh)
        made = connect_all(self._courier, seat.device, seat.pp_ranks, self._watch.lost, gpu, direct=direct)
        if direct and self._groups.dp is not None:
            (groups,) = (each for each in made.carriers if isinstance(each, nccl.Communicators))
            self._sums = groups.connect_replicas(self._groups.dp, seat.dp_ranks, seat.replica)
        return made

    def _could_not_connect(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._watch.raised(error)
        self._watch.close()

    def in_child(self) -> None:
        """A forked child is no rank. Its copies of groups are never destroyed: they share the parent's epoll."""
        keep_for_ever(self)
        if hasattr(self, "_links"):
            self._links.in_child()

    # -- before the first step --------------------------------------------------------------------------------------

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Every rank was asked for the same, or all of them refuse."""
        self._agreement.reach(facts, self._watch.check)

    def compare_weights(self, module: nn.Module) -> None:
        """While each rank has all of them as it has made them; `check_start` refuses those that differ."""
        self._sameness.compare_weights(module)

    def refuse(self, error: BaseException) -> None:
        """The pipeline could not be made on this rank, so nobody need wait for it."""
        if not self._agreement.refused and not isinstance(error, TransportError):
            self._watch.raised(error)

    def first_microbatch(self, microbatches: int) -> int:
        """Replica r has microbatches r M to r M + M - 1, with the random numbers of these."""
        return self.seat.replica * microbatches

    def adopt(
        self,
        module: nn.Module,
        stages: Mapping[int, Stage],
        parts: Sequence[Sequence[Any]],
        schedule: Schedule,
        tied: Tied,
    ) -> list[Tie]:
        """The model is cut, and these stages are here: shared parameters and replicas start with the same values.
        `parts` are the layers of each stage, also of those elsewhere.
        """
        known = self._homes
        uses = uses_of(parts)
        devices = [schedule.placement.device(stage, 0) for stage in range(schedule.num_stages)]
        self._homes = Homes(self.seat.device, parts, devices, uses)
        self._holders = []
        ties = tie(module, stages, uses, [self.seat.torch_device] * schedule.num_stages, tied, self._away(uses))
        for parameter, holders in self._holders:
            holders.share_value(parameter)
        self._sharded = Sharded(stages)
        self._parameters = list(dict.fromkeys(each for stage in stages.values() for each in stage.parameters()))
        if self._groups.dp is not None:
            shared = {each.parameter for each in ties}
            earlier = list(self._buckets.values()) if self._pending.steps else []
            self._buckets = {
                number: Buckets(self._sums, [each for each in stage.parameters() if each not in shared], earlier)
                for number, stage in sorted(stages.items(), reverse=True)
            }
            self._buckets[_SHARED] = Buckets(self._sums, [each.parameter for each in ties if each.is_home], earlier)
            if not known.known:
                layers = [part for stage in stages.values() for part in (*stage.layers, stage.loss)]
                same_everywhere(self._groups.dp, _tensors(layers))
            else:  # what an edit or a new trace has brought
                same_everywhere(self._groups.dp, [each for each in self._parameters if not known.knows(each)])
        return ties

    def _away(self, uses: Uses) -> Callable[[int, Sequence[int]], Holders | None]:
        shared = [parameter for parameter, stages in uses.items() if len(stages) > 1]

        def away(number: int, stages: Sequence[int]) -> Holders | None:
            if len({self._homes.devices[stage] for stage in stages}) == 1:
                return None
            holders = Holders(self._links, number, self._homes.devices, stages, self.seat.torch_device)
            self._holders.append((shared[number], holders))
            return holders

        return away

    def channels(self, schedule: Schedule) -> Transport:
        return RankChannels(schedule, self._links)

    # -- failures ---------------------------------------------------------------------------------------------------

    def call(self, doing: str, *, leaves: bool = True) -> AbstractContextManager[None]:
        """Around everything that all ranks do together: `doing` a step, say."""
        if os.getpid() != self._process:
            raise TransportError(
                f"process {os.getpid()} is a forked child of rank {self._watch.me} (process {self._process}) and has "
                "no connection to the other ranks: make this call in the rank itself, on every rank"
            )
        self._watch.check()
        failure = self._courier.failure
        if failure is not None and is_lost(failure):
            raise self._watch.lost(None, failure) from None
        self._links.check()
        return self._watch.call(doing, leaves=leaves)

    def made(self) -> None:
        """The pipeline is complete."""
        self._sameness.begin()
        self._watch.made()

    def running(self, program: Program, costs: Costs | None) -> AbstractContextManager[None]:
        """Around the actions of a program: from here on others depend on this rank."""
        self._check_weights()
        self._watch.begun = True
        key = (program.schedule.num_microbatches, program.inference)
        if key not in self._planned:
            self._planned[key] = planned_work(program.schedule, self.seat.device, costs)
        return self._whereabouts.running(program)

    def _rows(self) -> list[Row]:
        devices = [f"rank {rank} (device {device})" for device, rank in enumerate(self.seat.pp_ranks)]
        replicas = [f"rank {rank} (replica {replica})" for replica, rank in enumerate(self.seat.dp_ranks)]
        groups = self._groups
        return [Row(groups.pp, self.seat.device, devices), Row(groups.dp, self.seat.replica, replicas)]

    @property
    def stopping(self) -> bool:
        return self._watch.leaving

    def _failed(self, error: BaseException) -> None:
        """The courier did, which may be another rank's doing."""
        if not is_lost(error):
            self._watch.raised(error)
        self._links.break_off()  # or others would wait for what will never be sent

    def _break_off(self) -> None:
        self._links.break_off()
        if self._groups.dp is not None:
            self._groups.dp.break_off()

    def check_start(self) -> None:
        """Raises on every rank if those of a pipeline have started with different weights."""
        self._sameness.check_start()

    def check_batch(
        self, inputs: Any, target: Any, numbers: Sequence[float], schedule: Schedule, *, inference: bool
    ) -> None:
        """Raises on every rank if those of this pipeline have got different batches. Most often it does nothing."""
        first, last = (schedule.placement.device(stage, 0) for stage in (0, schedule.num_stages - 1))
        self._sameness.check(inputs, target, numbers, first=first, last=last, inference=inference)

    # -- a step -----------------------------------------------------------------------------------------------------

    def weights(self, counted: Weighed, room: int, part: Share) -> Sequence[float]:
        """The share of each microbatch in the minibatch of all replicas."""
        self._part, self._shares = part, None
        if self._groups.dp is not None:
            self._shares = Shares(self._groups.dp, self.seat.replica, counted, room, part)
            return self._shares
        counted.check_kept()
        return part.shares(counted.numbers, sum(counted.numbers), summed=counted.summed)

    def begin(self) -> None:
        self._sharded.begin()
        self._due, self._ended = [stage for stage in self._buckets if stage != _SHARED], set()
        for buckets in self._buckets.values():
            buckets.begin()

    def after(self, schedule: Schedule) -> Mapping[Action, Callable[[Batch], None]]:
        """The losses go to all ranks as soon as they are there, and the gradients of a stage to all replicas."""
        if schedule.kinds == {Kind.FORWARD}:
            return {}  # nobody knows yet whether there is a loss
        row = schedule.rows[self.seat.device]
        last: dict[int, Action] = {}
        for action in row:
            if action.kind in _LAST_GRADIENTS:
                last[action.stage] = action
        after: dict[Action, Callable[[Batch], None]] = {
            action: partial(self._finished, stage) for stage, action in last.items()
        }
        forwards = [action for action in row if action.kind is Kind.FORWARD and action.stage == schedule.num_stages - 1]
        if forwards:
            after[forwards[-1]] = lambda batch: self._send(batch.losses)
        return after

    def _finished(self, stage: int, _: Batch) -> None:
        """The last weight gradient of a stage is there. Sums start in one order on all replicas, whatever their
        schedules.
        """
        self._sharded.finish(stage, sync=self._part.sync)
        self._ended.add(stage)
        while self._part.sync and self._due and self._due[0] in self._ended:
            buckets = self._buckets[self._due.pop(0)]
            if self.seat.torch_device.type == "cpu":
                self._courier.put((Buckets.start, buckets))
            else:
                buckets.start()  # posted to the stream that has made them

    def end(self, ties: Sequence[Tie]) -> None:
        """All gradients are the sums of all ranks, or wait for a later step to exchange them."""
        for each in ties:
            each.end()
        if self._shares is not None:
            self._shares.everywhere()  # all replicas mean the same
        if self._shares is None or self._part.sync:
            self._exchange()
        else:
            for buckets in self._buckets.values():
                buckets.keep()
            self._pending.add(self._parameters)
        where = self._whereabouts
        self._pace.note(where.seconds - where.waited, self._planned[where.microbatches, False])

    def _check_weights(self) -> None:
        """Raises on every rank if those of this one were changed while gradients waited for an exchange."""
        try:
            self._pending.check_weights()
        except ConfigError as error:
            self._watch.raised(error)
            raise

    def _exchange(self) -> None:
        if self._buckets:
            self._courier.flush()
            self._buckets[_SHARED].start()
        for buckets in self._buckets.values():
            buckets.finish()
        for parameter, holders in self._holders:
            holders.share_grad(parameter)
        self._pending.clear()

    def give_up(self) -> None:
        """The step has failed."""
        self._pending.clear()
        self._sharded.release()
        for buckets in self._buckets.values():
            buckets.give_up()

    def losses(
        self, schedule: Schedule, losses: Sequence[Tensor], weights: Sequence[float]
    ) -> tuple[tuple[Tensor, ...], tuple[float, ...]]:
        """Those of all microbatches, of all replicas, on every rank, and their weights."""
        owner = schedule.placement.device(schedule.num_stages - 1, 0)
        if owner != self.seat.device:
            weight, sync, *together = self._links.incoming(owner, "loss").get()
            ranks = self.seat.pp_ranks
            check_same(self._part, (weight, sync), f"rank {ranks[self.seat.device]}", f"rank {ranks[owner]}")
            losses = together[0].to(self.seat.torch_device).unbind() if together else ()
        elif schedule.kinds == {Kind.FORWARD}:
            self._send(losses)
        if isinstance(weights, Shares) and losses:
            rows = weights.everywhere()
            losses = gathered(self._groups.dp, losses, [len(row) for row in rows], self.seat.torch_device)
            weights = [weight for row in rows for weight in row]
        return tuple(losses), tuple(weights)

    def _send(self, losses: Sequence[Tensor]) -> None:
        together = [float(self._part.weight), self._part.sync, *([torch.stack(list(losses))] if len(losses) else [])]
        for device in range(self.seat.num_devices):
            if device != self.seat.device:
                self._links.outgoing(device, "loss").hand(together)

    def release(self) -> None:
        """An evaluation is over."""
        self._sharded.release()

    def check_scaler(self) -> None:
        raise ConfigError(
            "a GradScaler checks on each rank alone whether gradients are finite, so ranks would skip different "
            "steps: use bfloat16, which needs no scaler, or devices= in one process"
        )

    # -- the model --------------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        """Whether a stage of this rank uses it."""
        return self._homes.holds(tensor)

    def state(self, module: nn.Module, whole: bool) -> dict[str, Any]:
        self._check_weights()
        self._homes.find_buffers()
        if not whole:
            return held(module, self._homes.holds)
        with self.call("gathering the state of its model", leaves=False):
            return gather(module, self._homes.home, self.seat.device, self._groups.pp)

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
        self._homes.find_buffers()
        loaded = load(module, state, self._homes.holds, strict)
        self._pending.note(self._parameters)
        return loaded

    def zero_grad(self, module: nn.Module, set_to_none: bool) -> None:
        """What waits for an exchange is dropped too."""
        self._check_weights()
        module.zero_grad(set_to_none)
        if self._pending.steps:
            self._sharded.drop()
            for buckets in self._buckets.values():
                buckets.drop()
        self._pending.clear()

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        self._pending.check_nothing("clip_grad_norm_")
        mine = {each for each in parameters if self.holds(each)}
        counted = {each for each in mine if self._homes.home(each) == self.seat.device}
        with self.call("clipping gradients", leaves=False):
            return clip_everywhere(parameters, mine, counted, self._groups.pp, max_norm, norm_type)

    # -- what was measured ------------------------------------------------------------------------------------------

    def measured(self, program: Program) -> Timeline:
        """Of all devices: every rank has it."""
        if self._clock is None:
            self._clock = SharedClock(self._groups.pp, self.seat.device)
        return self._clock.timeline(program.schedule, program.marks[self.seat.device], self.lanes[0])

    def hops(self) -> list[Hop]:
        """From each device of this pipeline to the next: every rank has all of them."""
        with self.call("measuring its links"):
            return measure_hops(self._links, self._groups.pp, self.seat.torch_device)

    def from_first(self, make: Callable[[], str]) -> str:
        """What the first device makes, on every rank."""
        with self.call("planning"):
            if self.seat.device > 0:
                (came,) = self._links.incoming(0, "loss").get()
                return bytes(came.tolist()).decode()
            text = make()
            letters = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.seat.torch_device)
            for device in range(1, self.seat.num_devices):
                self._links.outgoing(device, "loss").hand([letters])
            return text

    def close(self) -> None:
        self._watch.say_goodbye()
        self._links.close(lambda: self._watch.news is not None, self._watch.timeout)
        self._buckets, self._sums, self._pace = {}, None, Pace(())
        self._sameness = Sameness(self.seat, None, None)
        self._groups.close()
        self._watch.close()


_SHARED = -1


def _tensors(layers: Sequence[Any]) -> list[Tensor]:
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())
