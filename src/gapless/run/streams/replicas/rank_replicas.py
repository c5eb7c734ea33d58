"""Replicas on ranks of their own, under torchrun: each trains on its own loader, at its own pace.

    rank 0   read --gradient-- apply   read ...        and the weights of all, in a thread that answers messages
    rank 1      read --gradient---- apply   read ...
    rank 2    read -gradient- apply  read ...

The caller's thread computes, in its `next`. What goes wrong on one rank stops all of them in order: each ends with the
weights as they are then, and another run goes on from there. A rank that is dead or silent ends the connections.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gapless.errors import ConfigError, TransportError, note_place, noted_place
from gapless.run.ranks.agreement import Agreement
from gapless.run.ranks.fingerprints import fingerprints, saved_tensors
from gapless.run.ranks.mesh_position import facts_of
from gapless.run.ranks.watch.blame import in_short
from gapless.run.ranks.watch.children import tell_in_child
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire.groups import connected, keep_for_ever, network_device, part_of_store
from gapless.run.streams.replicas.asp import Asp
from gapless.run.streams.replicas.local_steps import LocalSteps
from gapless.run.streams.replicas.order import Order
from gapless.run.streams.replicas.parameter_server import FAILED, LEFT, REFUSED, ParameterServer
from gapless.run.streams.replicas.rank_messages import RankMessage, ServerConnections
from gapless.run.streams.replicas.replica import Replica, casts_unkept
from gapless.run.streams.replicas.replica_state import (
    buffers_of,
    copy_state,
    optimizer_state_of,
    put_optimizer_state,
    put_state,
    state_of,
)
from gapless.run.streams.replicas.replica_threads import ReplicaResult, pair_of
from gapless.run.streams.replicas.replica_whereabouts import ReplicaWhereabouts
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.random.exclusive import exclusively

_LOG = logging.getLogger("gapless")
_END = object()


class RankReplicas:
    """The replica of this rank, and its connections."""

    def __init__(self, mesh: DeviceMesh, timeout: float, facts: Mapping[str, Any]) -> None:
        self.ranks, self._rank, self._process = tuple(mesh.mesh.flatten().tolist()), dist.get_rank(), os.getpid()
        self.number = self.ranks.index(self._rank)
        network = network_device()
        agreement = Agreement(part_of_store("replicas", self.ranks), self.ranks, self._rank, timeout)
        agreement.reach({**facts_of(mesh), **facts}, lambda: None)
        tell_in_child(self)
        connect = partial(connected, network=network)
        self._watch = Watch(self.ranks, self._rank, connect, timeout)
        self._watch.of = "replicas"
        self._place = self._watch.whereabouts = ReplicaWhereabouts(self._rank)
        self._server: ParameterServer | None = None
        self.order, self.updates, self.next = Order(), 0, 0
        self._leaves = ""  # why a run is left
        self._runs = 0  # that have ended
        self._finished: RankMessage | None = None  # what came when the last run had ended
        self._missing: set[int] = set()  # replicas that have not said thanks
        try:
            self._mail = ServerConnections(self.ranks, self.number, connect, self._watch.lost_connection)
        except BaseException:
            self._watch.close()
            raise
        self._watch.break_off = self._mail.break_off

    def share(self, model: nn.Module, replica: Replica, course: Asp | LocalSteps, threads: int) -> None:
        """What is trained, and how. That of the first rank counts, where the weights are shared."""
        self._model, self._replica, self._threads = model, replica, threads
        self._local = course if isinstance(course, LocalSteps) else None
        if self.number == 0:
            shared = None if isinstance(course, LocalSteps) else course
            self._server = ParameterServer(model, shared, self.ranks, threads, self._mail.send)
        self._mail.open(None if self._server is None else self._server.take)
        self._watch.made()

    def in_child(self) -> None:
        """A forked child is no rank."""
        keep_for_ever(self)

    # -- a run ------------------------------------------------------------------------------------------------------

    def results(self, batches: Iterator[Any], first: int) -> Iterator[ReplicaResult]:
        """Of this rank's own minibatches. Left before the loader's end, the run ends on all ranks."""
        if os.getpid() != self._process:
            raise TransportError(
                f"process {os.getpid()} is a forked child of rank {self._rank}, without its connections: train in the "
                "rank itself"
            )
        self._watch.check()
        self._steps, self._leaves, self._finished = 0, "", None
        error: BaseException | None = None
        try:
            self._begin(first)
            yield from self._trained(batches, first)
        except BaseException as found:
            error = found
        self._end(error)

    def _begin(self, first: int) -> None:
        module = self._model
        same = "".join("01"[each.requires_grad] for each in module.parameters())
        same += "".join("01"[each.training] for each in module.modules())
        prints = fingerprints(list(dict(saved_tensors(module)).values()))
        answer = self._ask(RankMessage("begin", (first,), same, prints), "waiting for all ranks to begin a run")
        if answer.kind == "go":
            if self.number:  # the first rank has them, and updates of others may be in them by now
                put_state(module, answer.tensors)
            put_state(self._replica.module, answer.tensors)
        self._stopped = answer.kind == "stop"

    def _trained(self, batches: Iterator[Any], first: int) -> Iterator[ReplicaResult]:
        local = self._local
        while not self._stopped and not self._watch.departure.was_asked():
            with exclusively():
                batch = next(batches, _END)
            if batch is _END:
                break
            pair = pair_of(batch, self._steps)
            result = self._shared_step(pair) if local is None else self._own_step(pair, first, local)
            if result is None:
                break
            yield result
        if local is not None and self._steps % local.steps and not self._stopped:
            self._average(local)

    def _shared_step(self, pair: tuple[Any, Any]) -> ReplicaResult | None:
        """None if all are to stop."""
        weights = self._ask(RankMessage("read"), "waiting for weights")
        if self._stopped:
            return None
        put_state(self._replica.module, weights.tensors)
        (minibatch,) = weights.numbers
        loss = self._gradient(minibatch, pair)
        grads = [None if grad is None else grad.detach().cpu() for grad in self._replica.grads]
        sent = {"grads": grads, "buffers": buffers_of(self._replica.module)}
        applied = self._ask(RankMessage("apply", tensors=sent), f"waiting for the update of minibatch {minibatch}")
        if self._stopped:
            return None
        self._steps += 1
        return ReplicaResult(minibatch, loss, self.number, applied.numbers[0])

    def _own_step(self, pair: tuple[Any, Any], first: int, local: LocalSteps) -> ReplicaResult | None:
        count = len(self.ranks)
        minibatch, done = first + self._steps * count + self.number, self._steps % local.steps
        loss = self._gradient(minibatch, pair)
        with intra_op_threads(self._threads):
            local.learn(self._replica)
        self._steps += 1
        if done + 1 == local.steps:
            self._average(local)
        return None if self._stopped else ReplicaResult(minibatch, loss, self.number, done * (count - 1))

    def _gradient(self, minibatch: int, pair: tuple[Any, Any]) -> Any:
        where = f"in the gradient of minibatch {minibatch}"
        with self._place.at(where, waits=False), intra_op_threads(self._threads), casts_unkept():
            try:
                return self._replica.gradient(minibatch, *pair)
            except BaseException as error:
                note_place(error, f"in replica {self.number}, minibatch {minibatch}")
                raise

    def _average(self, local: LocalSteps) -> None:
        parameters = self._replica.parameters
        kept = optimizer_state_of(local.optimizers[0], parameters) if local.average_state else []
        there = [{name: value.cpu() for name, value in each.items()} for each in kept]
        sent = {**state_of(self._replica.module), "optimizer": there}
        mean = self._ask(RankMessage("average", tensors=sent), f"waiting for the average after {self._steps} steps")
        if self._stopped:
            return
        put_state(self._model, mean.tensors)
        copy_state(self._model, self._replica.module, trained_only=True)
        put_optimizer_state(kept, mean.tensors["optimizer"])

    # -- its end ----------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> None:
        """A run that ends now has ended so, and the others are to know."""
        where = noted_place(error)
        self._leaves = f"failed {where}: {in_short(error)}" if where else f"failed: {in_short(error)}"
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._leaves = "was interrupted"

    def _end(self, error: BaseException | None) -> None:
        """In order, on all ranks, whatever has happened on this one; raises that, or what has stopped it."""
        if isinstance(error, TransportError) and self._watch.news is not None:
            raise error
        try:
            if error is not None:
                self._tell(error)
            self._mail.tell_server(RankMessage("end", (self._steps,)))
            self._missing = set(range(1, len(self.ranks))) if self.number == 0 else set()
            try:
                final = self._final()
            except KeyboardInterrupt as interrupt:  # while the others went on; a second one breaks off
                error = error or interrupt
                self._tell(interrupt)
                final = self._final()
        except BaseException as another:
            if not isinstance(another, TransportError):
                self._watch.raised(another)
            raise
        finally:
            self._runs += 1
        try:
            self._take_over(final)
        except KeyboardInterrupt as interrupt:  # all of it, or the model would be like no other
            self._take_over(final)
            error = error or interrupt
        _, _, stopped_by, how = final.numbers
        _, reason = json.loads(final.words)
        at = f"the model has had {self.updates} updates"
        if self._server is not None and self._server.failure is not None and stopped_by == 0:
            error, self._server.failure = self._server.failure, None
        if error is not None:
            error.add_note(f"gapless: {at}")
            raise error
        if reason and how == LEFT:
            _LOG.warning("rank %d ends its run, since %s; %s", self._rank, reason, at)
        elif reason:
            raise (ConfigError if how == REFUSED else TransportError)(
                f"the replicas have stopped, since {reason}: {at}"
            )
        if self._watch.departure.was_asked():
            _LOG.warning("rank %d ends its run and exits: it received SIGTERM; %s", self._rank, at)
            raise SystemExit(0)

    def _take_over(self, final: RankMessage) -> None:
        self.updates, self.next, _, _ = final.numbers
        self.order = Order.parse(json.loads(final.words)[0])
        put_state(self._model, final.tensors)

    def _tell(self, error: BaseException) -> None:
        """All others are to stop."""
        how = FAILED
        if isinstance(error, GeneratorExit) and not self._leaves:
            how, self._leaves = LEFT, f"has left its loop after {self._steps} minibatches"
        elif not isinstance(error, GeneratorExit):
            self.leave(error)
        self._mail.tell_server(RankMessage("stop", (self._runs, how), f"rank {self._rank} {self._leaves}"))

    def _final(self) -> RankMessage:
        """What comes when all have ended, and on the first rank the thanks of the others."""
        with self._place.at("waiting for all ranks to end their run", waits=True):
            while self._finished is None or self._missing:
                message = self._mail.next(self._missing if self._finished is not None else None)
                if message.kind == "final":
                    self._finished = message
                    if self.number:
                        self._mail.tell_server(RankMessage("thanks"))
                elif message.kind == "thanks":
                    self._missing.discard(message.numbers[0])
        return self._finished

    def _ask(self, message: RankMessage, doing: str) -> RankMessage:
        with self._place.at(doing, waits=True):
            self._mail.tell_server(message)
            answer = self._mail.next()
        self._stopped = answer.kind == "stop"
        return answer

    def close(self) -> None:
        """The others are told."""
        if os.getpid() != self._process:
            return
        self._watch.say_goodbye()
        self._mail.close()
        self._watch.close()
