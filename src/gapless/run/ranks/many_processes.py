"""One process per device: what a pipeline under a mesh does with the other ranks, apart from handing tensors on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapless.errors import ConfigError, TransportError
from gapless.model.uses import tie, uses_of
from gapless.run.clip import OwnPart, clip_everywhere
from gapless.run.execute import execute
from gapless.run.lanes import make_lane
from gapless.run.program import Program
from gapless.run.ranks.agreement import Agreement
from gapless.run.ranks.consistency import Consistency
from gapless.run.ranks.exchange import Exchange
from gapless.run.ranks.losses import Losses
from gapless.run.ranks.mesh_position import MeshPosition, RankGathering, facts_of, make_groups
from gapless.run.ranks.replicas import same_everywhere, tensors_of
from gapless.run.ranks.shared_parameter import Holders, copies, shared
from gapless.run.ranks.state_dict import Homes, gather, held, load
from gapless.run.ranks.timing import Pace, SharedClock, compared, planned_work
from gapless.run.ranks.watch.blame import is_lost
from gapless.run.ranks.watch.children import tell_in_child
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire import nccl
from gapless.run.ranks.wire.channel import Courier, reach_in_streams
from gapless.run.ranks.wire.connections import Connections, RankChannels, connect_all
from gapless.run.ranks.wire.groups import connected, keep_for_ever, network_device, part_of_store
from gapless.run.team import make_team
from gapless.run.world import Carriage, Evaluated, OwnStages, Parts, Ran
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.placement import Placement
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.share import Share
from gapless.stage.shared.tie import Tie, Tied


class ManyProcesses:
    """This rank's device, and its connections to the others."""

    tied: Tied = "summed"
    one_process = False

    def __init__(
        self, position: MeshPosition, timeout: float, intra_op_threads: int | None, carriage: Carriage
    ) -> None:
        self.position = position
        self.devices: Sequence[torch.device] = [position.torch_device] * position.num_devices
        self.here: Sequence[int] = (position.device,)
        self.replica, self.num_replicas = position.replica, position.num_replicas
        self.lane = make_lane(position.torch_device)
        self.team = make_team(self.here, intra_op_threads)
        network, rank = network_device(), dist.get_rank()
        self._agreement = Agreement(part_of_store("agreement", sorted(position.ring)), position.ring, rank, timeout)
        self._agreement.reach({**facts_of(position.mesh), **carriage._asdict()}, lambda: None)
        tell_in_child(self)
        self.watch = Watch(position.ring, rank, partial(connected, network=network), timeout)
        courier: Courier | None = None
        try:
            self.groups = make_groups(position, network)
            self._sums = self.groups.dp  # of gradients
            courier = self._courier = Courier(self.groups.pp, f"gapless device {position.device}", self._failed)
            self.links = self._connect(carriage)
            self.near = self.num_replicas == 1 and reach_in_streams(self.links.carriers, len(self.devices))
            # A rank that is refused closes its connections, which Gloo takes ill while another still makes them.
            self._agreement.reach({}, self.watch.check)
        except BaseException as error:  # nobody is to believe that this rank lives on
            if courier is not None:
                courier.close(lambda: True)
            self.watch.raised(error)
            self.watch.close()
            raise
        self.watch.whereabouts.connections = self.links
        self.watch.break_off = self._break_off
        self._pace = Pace(compared(position, self.groups.pp, self.groups.dp))
        self._consistency = Consistency(position, self.groups, self.links, self.watch)
        self._holders: list[tuple[nn.Parameter, Holders]] = []
        self._ties: list[Tie] = []
        poster = self._courier if position.torch_device.type == "cpu" else None
        self._exchange = Exchange(self.groups.dp, self._sums, position.dp_ranks, position.replica, poster)
        self._losses = Losses(position, self.links, self.groups.dp)
        self._homes, self._clock = Homes(position.device), SharedClock(self.groups, position.device)
        self._unfinished = False  # steps of a minibatch are done, and others of it are to come

    def _connect(self, carriage: Carriage) -> Connections:
        position, gpu = self.position, self.position.torch_device if self.position.torch_device.type != "cpu" else None
        has_nccl = gpu is not None and nccl.is_used(position.mesh)
        where = self._courier, position.device, position.pp_ranks, self.watch.lost_connection
        made = connect_all(*where, gpu, has_nccl=has_nccl, carriage=carriage)
        groups = [each for each in made.carriers if isinstance(each, nccl.Communicators)]
        if groups and self.groups.dp is not None:
            self._sums = groups[0].connect_replicas(self.groups.dp, position.dp_ranks, position.replica)
        return made

    def in_child(self) -> None:
        """A forked child is no rank. Its copies of groups are never destroyed: they share the parent's epoll."""
        keep_for_ever(self)
        if hasattr(self, "links"):
            self.links.in_child()

    @contextmanager
    def making(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not self._agreement.refused and not isinstance(error, TransportError):
                self.watch.raised(error)
            raise
        self._consistency.made()
        self.watch.made()

    def agree(self, facts: Mapping[str, Any], module: nn.Module | None = None, loss: Any = None) -> None:
        self._agreement.reach(facts, self.watch.check)
        self._consistency.most_microbatches = facts["microbatches"]
        if module is not None:
            self._consistency.compare_weights(module, loss)

    def adopt(self, module: nn.Module, stages: OwnStages, parts: Parts, placement: Placement, tied: Tied) -> None:
        for each in self._ties:
            each.release()
        self._consistency.adopt(module)
        known, uses = self._homes, uses_of(parts)
        self._homes = Homes(self.position.device, parts, placement.cycles, uses, module)
        self._own_part = OwnPart(each for each in uses if self.position.num_devices > 1 and self._homes.holds(each))
        here = [self.position.torch_device] * placement.num_stages
        self._holders, away = shared(self.links, uses, self._homes.devices, self.position.torch_device)
        self._ties = tie(module, stages, uses, here, tied, away)
        of_loss = self._losses.adopt(parts[-1][-1], module)
        self._holders += copies(self.links, of_loss, self._homes.devices[-1], self.position.torch_device, len(uses))
        for parameter, holders in self._holders:
            holders.share_value(parameter)
        self._exchange.adopt(stages, self._ties)
        if self.groups.dp is not None:
            layers = [part for stage in stages.values() for part in (*stage.layers, stage.loss)]
            new = [each for each in self._exchange.parameters if not known.knows(each)]  # by an edit or a new trace
            same_everywhere(self.groups.dp, new if known.known else tensors_of(layers))

    def program(
        self, schedule: Schedule, stages: OwnStages, loss: Evaluated, costs: Costs | None, *, recorded: bool
    ) -> Program:
        ways, lanes = RankChannels(schedule, self.links), [self.lane] * self.position.num_devices
        after = {}
        if schedule.kinds != {Kind.FORWARD}:  # of an evaluation nobody knows yet whether there is a loss
            row = schedule.rows[self.position.device]
            after = self._exchange.after(row) | self._losses.after(row, schedule.num_stages - 1)
            self._pace.planned[schedule.num_microbatches] = planned_work(schedule, self.position.device, costs)
        return Program(schedule, stages, lanes, loss, ways, here=self.here, recorded=recorded, after=after, costs=costs)

    @contextmanager
    def call(self, doing: str) -> Iterator[None]:
        with self.team.held(), self._consistency.call(doing, leaves=not self._unfinished):
            self._consistency.start(doing)
            yield

    @property
    def busy(self) -> bool:
        return self.team.busy

    @property
    def stopping(self) -> bool:
        return self.watch.leaving and not self._unfinished

    def _failed(self, error: BaseException) -> None:
        """The courier did, which may be another rank's doing."""
        if not is_lost(error):
            self.watch.raised(error)
        self.links.break_off()  # or others would wait for what will never be sent

    def _break_off(self) -> None:
        self.links.break_off()
        self.groups.break_off()

    def weights(self, program: Program, inputs: Any, target: Any, counted: Weighed, share: Share) -> Sequence[float]:
        schedule, numbers = program.schedule, () if program.inference else counted.numbers
        first, last = (schedule.placement.device(stage, 0) for stage in (0, schedule.num_stages - 1))
        channels = program.channels

        def check() -> None:
            self._consistency.check(inputs, target, numbers, first=first, last=last, inference=program.inference)
            if not program.inference and isinstance(channels, RankChannels):
                channels.agree(program, inputs, target, self._consistency.agreed)

        self._consistency.detail(program, share)
        self._consistency.meet(check)
        return self._exchange.weights(counted, self._consistency.most_microbatches, share, self._consistency.stamp.call)

    def of_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        self.watch.roll.begin()
        return self.groups.everywhere(list(numbers))[:: self.position.num_devices]

    def run(self, program: Program, weights: Sequence[float]) -> Ran:
        try:
            if not program.inference:
                self._exchange.begin()
                with self.lane.entered():  # in its stream, as the gradients that will come
                    for each in self._ties:
                        each.begin()
            self._check_weights()
            self.watch.roll.begin()  # from here on others depend on this rank
            channels = program.channels
            watched = channels.watched() if isinstance(channels, RankChannels) else nullcontext()
            with self.watch.whereabouts.running(program), watched, self._homes.unchanged():
                execute(program, self.team)
            if not program.inference:
                self._end()
                for stage in program.stages.values():
                    stage.finish()
                self._unfinished = not self._exchange.share.sync
            losses, weights = self._losses.everywhere(program, weights)
            return Ran(losses, tuple(weights), self._clock.timeline(program, self.lane) if program.recorded else None)
        except BaseException:
            if not program.inference:
                self._exchange.give_up()
                self._unfinished = False
            raise
        finally:
            if program.inference:
                self._exchange.release()

    def _end(self) -> None:
        """All gradients are the sums of all ranks, or wait for a later step to exchange them."""
        for each in self._ties:
            each.end()
        if self._exchange.end(self._courier.flush):
            for parameter, holders in self._holders:
                holders.share_grad(parameter)
        where = self.watch.whereabouts
        self._pace.note(where.seconds - where.waited, where.microbatches)

    def _check_weights(self) -> None:
        """Raises on every rank if those of this one were changed while gradients waited for an exchange."""
        try:
            self._exchange.pending.check_weights()
        except ConfigError as error:
            self.watch.raised(error)
            raise

    # -- the model --------------------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        return self._homes.holds(tensor)

    def state(self, module: nn.Module, whole: bool) -> dict[str, Any]:
        self._check_weights()
        self._homes.find_buffers()
        if not whole:
            return held(module, self._homes.holds)
        with self._consistency.call("gathering the state of its model", leaves=False, meet=False):
            self._consistency.meet()
            return gather(module, self._homes.home, self.position.device, self.groups.pp)

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
        self.watch.roll.note("loading a state")
        self._homes.find_buffers()
        loaded = load(module, state, self._homes.holds, strict)
        self._exchange.pending.note(self._exchange.parameters)
        return loaded

    def zero_grad(self, module: nn.Module, set_to_none: bool) -> None:
        self._check_weights()
        module.zero_grad(set_to_none)
        self._exchange.drop()
        self._unfinished = False

    def share_of(self, parameters: Sequence[nn.Parameter]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        mine = {each for each in parameters if self.holds(each)}.union(each for each, _ in self._holders)
        return mine, {each for each in mine if self._homes.home(each) == self.position.device}

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        self._exchange.pending.check_nothing("clip_grad_norm_")
        mine, counted = self.share_of(parameters)
        with self._consistency.call(
            "clipping gradients", (float(max_norm), float(norm_type)), leaves=False, meet=False
        ):
            self._consistency.meet()
            return clip_everywhere(parameters, mine, counted, self.groups.pp, max_norm, norm_type)

    @contextmanager
    def gathered(self, doing: str) -> Iterator[RankGathering]:
        with self.team.held(), self._consistency.call(doing, leaves=False):
            self._consistency.meet()
            yield RankGathering(self.position, self.groups, self.watch)

    def described(self) -> Iterator[str]:
        return self.links.described()

    def close(self) -> None:
        self.team.close()
        self.watch.say_goodbye()
        self.links.close(lambda: self.watch.news is not None, self.watch.timeout)
        self._exchange, self._sums, self._pace = Exchange(), None, Pace(())
        self._consistency.close()
        self.groups.close()
        self.watch.close()
