"""Data parallelism that does not wait: replicas of a model as threads of one process, or as ranks.

with gapless.AsyncReplicas(model, replicas=4, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.1)) as asp:
    for result in asp.run(loader):
        print(result.minibatch, result.loss, result.staleness)
"""

import inspect
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from gapless.errors import ConfigError, GaplessError
from gapless.model.traced.capture import own_loss
from gapless.run.streams.replicas.asp import Asp
from gapless.run.streams.replicas.local_steps import LocalSteps
from gapless.run.streams.replicas.order import Order
from gapless.run.streams.replicas.replica import Loss, Replica, casts_unkept
from gapless.run.streams.replicas.replica_arguments import (
    check_model,
    check_replicas,
    check_ways,
    check_whole,
    made_optimizer,
    made_scheduler,
)
from gapless.run.streams.replicas.replica_threads import ReplicaResult, ReplicaThreads, pair_of
from gapless.run.team import close_with
from gapless.stage.compiled import uncompiled
from gapless.stage.intra_op import intra_op_threads as with_intra_op_threads

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gapless.run.streams.replicas.rank_replicas import RankReplicas

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
Results = Generator[ReplicaResult, None, None]
MakeScheduler = Callable[[Optimizer], Any]


_BEGUN: Any = None  # the first thing that a run yields; nobody gets it
_END = object()


class AsyncReplicas:
    """Replicas of a model that train it together, each at its own pace: on threads of this process, or on ranks.

    Without `local_steps` (asynchronous parallel, ASP) a replica reads the model's weights, computes the gradient of a
    minibatch on its copy, and applies it to the weights as they are by then, with the one optimizer. Which replica
    takes a minibatch, and how old the weights of its gradient are, depends on timing; `order` records it, and `replay`
    repeats it bit-identically.

    With `local_steps=n` each replica steps alone, on its own weights, and every n steps the weights are averaged, so
    timing changes nothing. The optimizers' state is not averaged, unless `average_state` is True.

    model             an nn.Module; one that is not an nn.Sequential counts as one layer
    replicas          how many threads of this process; each has a copy of the model, on its device
    mesh              instead: a torch DeviceMesh with one dimension 'dp'. Every rank has a replica, its own loader and
                      the results of that. The first rank has the weights; others get them when a run has ended
    loss              loss(outputs, target), a scalar; without it the model's own: its `.loss`, `["loss"]` or scalar
    optimizer         a function of the parameters, called once, or for each replica with `local_steps`
    scheduler         a function of an optimizer, stepped after each of its updates
    bound             a replica waits while it is more than this many updates ahead of the slowest
    local_steps       steps between two averages
    average_state     average the optimizers' state with the weights: all of it except the step count
    clip              the largest norm of a minibatch's gradient
    seed              of everything random in the layers, together with minibatch and layer
    intra_op_threads  of each replica; by default the caller's, shared among them
    timeout           under a mesh: seconds without a heartbeat or progress of a rank before all ranks give up
    scaler            not supported: a GradScaler needs all replicas to wait for each other
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int | None = None,
        mesh: "DeviceMesh | None" = None,
        optimizer: MakeOptimizer,
        loss: Loss | None = None,
        scheduler: MakeScheduler | None = None,
        bound: int | None = None,
        local_steps: int | None = None,
        average_state: bool = False,
        clip: float | None = None,
        seed: int = 0,
        intra_op_threads: int | None = None,
        timeout: float = 600.0,
        scaler: object = None,
    ) -> None:
        model, compiler = uncompiled(model)
        here = check_replicas(replicas, mesh)
        check_ways(bound, local_steps, average_state)
        check_model(model, loss, scaler)
        self.seed = seed
        self.minibatches = 0  # begun so far; random numbers depend on it
        self._model = model
        threads = max(1, torch.get_num_threads() // len(here)) if intra_op_threads is None else intra_op_threads
        self._intra_op_threads = check_whole("intra_op_threads", threads, 1)
        used = own_loss if loss is None else loss
        self._replicas = [Replica(number, model, compiler, used, seed, clip) for number in here]
        self._course: Asp | LocalSteps
        if local_steps is None:
            made = made_optimizer(optimizer, list(model.parameters()))
            count = len(here) if mesh is None else mesh.size()
            self._course = Asp(model, count, made, made_scheduler(scheduler, made), bound)
        else:
            each = [made_optimizer(optimizer, replica.parameters) for replica in self._replicas]
            schedulers = [made_scheduler(scheduler, one) for one in each]
            self._course = LocalSteps(model, self._replicas, each, schedulers, local_steps, average_state=average_state)
        self._last: weakref.ref[Results] | None = None  # run; one that nobody iterates over any more has ended
        self._closed = False
        self._ranks: RankReplicas | None = None
        if mesh is not None:
            asked = {"bound": bound, "local_steps": local_steps, "average_state": average_state, "clip": clip}
            self._ranks = self._on_ranks(mesh, timeout, {**asked, "seed": seed})
            self._close_ranks = close_with(self, self._ranks.close)

    def _on_ranks(self, mesh: "DeviceMesh", timeout: float, asked: dict[str, Any]) -> "RankReplicas":
        from gapless.run.streams.replicas.rank_replicas import (
            RankReplicas,  # here alone: torch.distributed need not be there
        )

        shapes = {name: list(each.shape) for name, each in self._model.named_parameters()}
        made = RankReplicas(mesh, timeout, {**asked, "model": shapes})
        made.share(self._model, self._replicas[0], self._course, self._intra_op_threads)
        return made

    def run(self, loader: Iterable[Any]) -> Results:
        """Trains on every minibatch of the loader: pairs of inputs and target, or inputs alone. Yields a result for
        each once it is applied, with `local_steps` in the loader's order.

        The first failure stops all replicas and is raised here. Leaving the loop, or Ctrl-C, stops them too:
        minibatches in flight are dropped, and the model has the updates that were applied (with `local_steps`: the last
        average). By then up to 4 more minibatches per replica have been taken from the loader.

        Under a mesh every rank calls it, with its own minibatches, and gets their results. A rank whose loader has
        ended waits for the others. If one leaves the loop the run ends on all ranks, with a warning; a failure or
        Ctrl-C on one is an error on all.
        """
        results = self._started(self._run(iter(loader)))
        alone = isinstance(self._course, Asp) or self._ranks is not None
        return results if alone else _in_order(results, self.minibatches)

    def replay(self, order: Order | str, loader: Iterable[Any]) -> Results:
        """Repeats an order, or the text of one, in the caller's thread: from the same weights and minibatches
        the results are bit-identical to those of the recorded run.
        """
        if self._ranks is not None:
            count = len(self._ranks.ranks)
            raise ConfigError(
                f"an order of ranks is replayed in one process: AsyncReplicas(model, replicas={count}, "
                "...).replay(order, order.merged(loaders)), with the loader of each rank"
            )
        order = Order.parse(order) if isinstance(order, str) else order
        return self._started(self._replay(order, iter(loader), self._asp))

    @property
    def order(self) -> Order:
        """The reads and applies of the current or the last run; under a mesh of the last one."""
        course = self._asp
        return course.order if self._ranks is None else self._ranks.order

    @property
    def updates(self) -> int:
        """Updates applied so far by all replicas; under a mesh in the runs that have ended."""
        return self._course.updates if self._ranks is None else self._ranks.updates

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The shared optimizer or, with `local_steps`, that of each replica. Under a mesh those on this rank: the first
        rank has the shared one.
        """
        elsewhere = self._ranks is not None and self._ranks.number > 0 and isinstance(self._course, Asp)
        return () if elsewhere else self._course.optimizers

    @property
    def _asp(self) -> Asp:
        if isinstance(self._course, LocalSteps):
            raise ConfigError("with local_steps timing changes nothing, so there is no order: run it again instead")
        return self._course

    def _started(self, results: Results) -> Results:
        """Up to its first `yield`, so that it has an end, and what can't be done is said now."""
        if self._closed:
            raise GaplessError("the replicas are closed; make new ones")
        if not torch.is_grad_enabled():
            raise ConfigError("replicas compute gradients, but they are switched off here: train outside no_grad")
        if self._under_way() is not None:
            raise GaplessError("the replicas are in the middle of a run: go to its end, or close its iterator")
        for replica in self._replicas:
            replica.follow(self._model)
        next(results)
        self._last = weakref.ref(results)
        return results

    def _under_way(self) -> Results | None:
        last = None if self._last is None else self._last()
        return None if last is None or inspect.getgeneratorstate(last) == inspect.GEN_CLOSED else last

    def _run(self, batches: Iterator[Any]) -> Results:
        runs = self._ranks or ReplicaThreads(self._replicas, self._course, self._intra_op_threads)
        try:
            yield _BEGUN
            yield from runs.results(batches, self.minibatches)
        finally:
            self.minibatches = max(self.minibatches, runs.next)

    def _replay(self, order: Order, batches: Iterator[Any], asp: Asp) -> Results:
        """A gradient is computed when its weights are read: nothing that comes before its apply can change it."""
        if order.num_replicas > len(self._replicas):
            raise ConfigError(
                f"the order has {order.num_replicas} replicas, but there are {len(self._replicas)}: make as many"
            )
        under_way = {}
        try:
            yield _BEGUN
            asp.begin(self.minibatches)
            for number, kind in order.moves:
                replica, minibatch = self._replicas[number], asp.next
                batch = next(batches, _END) if kind == "r" else None
                if batch is _END:
                    raise ConfigError(
                        f"the order has {sum(move.kind == 'r' for move in order.moves)} minibatches, but the loader "
                        f"ended after {minibatch - self.minibatches}: give it all of them, as they were"
                    )
                with with_intra_op_threads(self._intra_op_threads), casts_unkept():
                    if kind == "r":
                        asp.read(replica)
                        under_way[number] = minibatch, replica.gradient(minibatch, *pair_of(batch, minibatch))
                        continue
                    staleness = asp.apply(replica)
                yield ReplicaResult(*under_way.pop(number), number, staleness)
        finally:
            self.minibatches = max(self.minibatches, asp.next)

    def close(self) -> None:
        """Stops the current run, under a mesh on all ranks."""
        self._closed = True
        try:
            if (results := self._under_way()) is not None:
                results.close()
        finally:
            if self._ranks is not None:
                self._close_ranks()

    def __enter__(self) -> "AsyncReplicas":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._ranks is not None and error is not None:
            self._ranks.leave(error)
        self.close()


def _in_order(results: Results, first: int) -> Results:
    """By minibatch."""
    early: dict[int, ReplicaResult] = {}
    with closing(results):
        for result in results:
            early[result.minibatch] = result
            while first in early:
                yield early.pop(first)
                first += 1
