"""A stage whose actions are CUDA graphs: each is launched with one call, so that the host is never in the way.

    steps 0 to 2    eagerly: what must be learnt of the layers is learnt
    step 3          each action is captured when it first comes, and replayed
    from then on    replayed, for microbatches made alike; anything else runs eagerly

Microbatches under way at the same time have places of their own: a microbatch gets the lowest number that is free, from
its forward to the end of its backward. Its forward, and its I, write into the pool of that number. A B and a W leave
nothing that outlives them, so they share one pool, and so does a forward that will be recomputed; its places are those
from its R on.

AccumulateGrad is no part of a graph: `.grad` is None while a backward is captured, so that what arrives there is left
in the pool, and is added to the `.grad` of the user's after each replay.

What can't be captured runs eagerly and is named once. If a backward can't be replayed, its forward runs again."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from gapless.stage.random.draws import UncapturableError
from gapless.stage.random.seeds import seed_of
from gapless.stage.shared.cell_ties import Stray
from gapless.stage.shared.tie import Place, Tie
from gapless.stage.stage import Stage, Then

from .graph_assumptions import why_no_call, why_not, why_too_large
from .graph_memory import Grads, GraphedHalf, GraphedMicrobatch, LeftTree, add_grads, fixed_grads, grads_aside
from .graph_sharing import Flight, ForwardCall, Likenesses
from .graph_trial import Trial
from .low_grads import LowGrads
from .replay import Pools, Replay, T, captured

Graphs = Literal["auto"] | bool
_SHARED = -1  # as the number of a pool


class GraphedStage(Stage):
    """The first microbatch of its likeness runs both ways, and what graphs do differently ends them. `tried`: they must
    be faster too, and nobody has asked for them.
    """

    def __init__(self, *args: Any, tried: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tried = tried
        self.likenesses = Likenesses([*self.layers, *([] if self.loss is None else [self.loss])], tried)
        self._loss_dtype: torch.dtype | None = None
        self._flights: dict[int, Flight] = {}
        self._free: set[int] = set()
        self._pools = Pools()  # of each number, and one that all share

    def reserved(self) -> int:
        """Bytes of its graphs."""
        pools, segments = {*self._pools.values()}, torch.cuda.memory_snapshot() if self._pools else []
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) in pools)

    def tie(self, number: int, ties: Sequence[Tie], stray: Stray | None = None) -> None:
        def noted(place: Place, parameter: Tensor, late: bool) -> None:
            likenesses.foreign = True
            if stray is not None:
                stray(place, parameter, late)

        likenesses, self.likenesses.number = self.likenesses, number
        super().tie(number, ties, noted)

    def forward(self, microbatch: int, inputs: Any, *, then: Then | None = None, **options: Any) -> Any:
        asked = ForwardCall(inputs, **{"place": microbatch, **options})
        if self.likenesses.begin(asked.step, self._why_not):
            self._pools, self._free = Pools(), set()
        like = None if asked.leaves else self.likenesses.of(asked)
        if like is None:
            handed = self._eagerly(microbatch, asked, then)
            if self.loss is not None:
                self._loss_dtype = handed[1].dtype
            return handed
        light = self.remat == "stage" and not asked.keep
        flight = self._flights[microbatch] = Flight(like, asked)
        handed = (self._light if light else self._full)(microbatch, flight)
        if handed is None:
            del self._flights[microbatch]
            return self._eagerly(microbatch, asked, then)
        handed = handed.copied() if flight.trial is None else flight.trial.handed
        if then is not None:
            then(handed)
        return handed

    def _eagerly(self, microbatch: int, asked: ForwardCall, then: Then | None = None) -> Any:
        return super().forward(microbatch, then=then, **asked._asdict())

    def _kept(self, asked: ForwardCall) -> ForwardCall:
        """A forward whose graph stays, as that of a recompute does; layers go on to be rebuilt one by one."""
        return asked._replace(keep=self.remat == "stage")

    def _light(self, microbatch: int, flight: Flight) -> LeftTree | None:
        """A forward that keeps nothing."""
        made = flight.like.light
        if made is None:
            made = flight.like.light = self._capture_forward(microbatch, flight.asked, _SHARED)
            if made is None:
                return None
            self._forget(microbatch)
        else:
            made.take(*flight.asked[:3])
        self._run(flight, made, flight.asked)
        return made.handed

    def _full(self, microbatch: int, flight: Flight) -> LeftTree | None:
        """A forward whose backward can follow."""
        number = min(self._free, default=sum(each.slot is not None for each in self._flights.values()))
        asked, slot = flight.asked, flight.like.slots.get(number)
        if slot is None:
            slot = self._capture_forward(microbatch, self._kept(asked), number)
            if slot is None:
                return None
            flight.like.slots[number] = slot
        else:
            slot.take(*asked[:3])
        self._free.discard(number)
        flight.number, flight.slot = number, slot
        self._run(flight, slot, self._kept(asked))
        flight.asked = asked._replace(inputs=None, target=None)
        return slot.handed

    def _run(self, flight: Flight, made: GraphedMicrobatch, asked: ForwardCall) -> None:
        """Replays a forward. The first of its likeness runs eagerly too, and what that makes is what goes on."""
        seed, like = self._seed(flight), flight.like
        self.likenesses.casts.fill()
        if like.trial is not None:
            made.forward.run(seed)
            return
        like.trial = flight.trial = trial = Trial()
        trial.handed = trial.timed(lambda: self._eagerly(flight.shadow, asked), graphed=False)
        trial.timed(lambda: made.forward.run(seed), graphed=True)
        trial.compare(trial.handed, made.handed.copied())

    def _capture_forward(self, microbatch: int, asked: ForwardCall, number: int) -> GraphedMicrobatch | None:
        try:
            slot = GraphedMicrobatch(*asked[:3], self._loss_dtype)
            fixed = asked._replace(inputs=slot.inputs.tree, target=slot.target.tree, weight=slot.weight)
            versions, draws = slot.inputs.versions + slot.target.versions, self._calls.draws.on_gpu
            slot.forward, handed = self._captured(lambda: self._eagerly(microbatch, fixed), number, draws)
            slot.handed = LeftTree(handed)
            if versions != slot.inputs.versions + slot.target.versions:
                raise UncapturableError("a layer changes its input in place")
        except Exception as error:
            self._failed(error, number)
            if microbatch in self._work:
                self._forget(microbatch)
            return None
        return slot

    def _captured(self, run: Callable[[], T], number: int, layers: Collection[int]) -> tuple[Replay, T]:
        with self.likenesses.capturing(), self.likenesses.casts.read(self._calls):
            return captured(run, self._pools[number], self._calls.draws, layers)

    def recompute(self, microbatch: int) -> None:
        flight = self._flights.get(microbatch)
        if flight is None:
            super().recompute(microbatch)
        elif flight.slot is None and (self.likenesses.reason is not None or self._full(microbatch, flight) is None):
            self._leave(microbatch)
            self._eagerly(microbatch, self._kept(flight.asked))

    def backward(self, microbatch: int, output_grads: Grads | None, then: Then | None = None) -> Grads:
        found = self._half("B", microbatch, output_grads, then)
        return super().backward(microbatch, output_grads, then) if found is None else found

    def backward_input(self, microbatch: int, output_grads: Grads | None, then: Then | None = None) -> Grads:
        found = self._half("I", microbatch, output_grads, then)
        return super().backward_input(microbatch, output_grads, then) if found is None else found

    def backward_weight(self, microbatch: int) -> None:
        if self._half("W", microbatch, None, None) is None:
            super().backward_weight(microbatch)

    def _half(self, name: str, microbatch: int, given: Grads | None, then: Then | None) -> Grads | None:
        """Replays it; None: it is to run eagerly, and can."""
        if microbatch not in self._flights:
            return None
        self.recompute(microbatch)
        if (flight := self._flights.get(microbatch)) is None:
            return None
        assert flight.slot is not None
        grads = given or []
        half = flight.slot.halves.get(name)
        if half is None and microbatch in self._work and self.likenesses.reason is None:
            half = self._capture_half(name, microbatch, flight.slot, grads)
        elif half is not None and not half.takes(grads):
            half = None
        if half is None:
            self._run_again(name, microbatch, flight, grads)
            return None
        self.likenesses.casts.fill()  # a recompute may have made more of them
        if flight.trial is not None:
            eagerly = partial(self._backward, name, flight.shadow, grads)
            found, added = flight.trial.half(eagerly, half, self._seed(flight), self.parameters())
        else:
            half.replay.run(self._seed(flight))
            found, added = half.found(), half.added
        if then is not None:
            then(found)
        add_grads(added)
        if name != "I":
            self._leave(microbatch, over=True)
            self._judge(flight, flight.slot, ("I", "W") if name == "W" else ("B",))
        return found

    def _capture_half(self, name: str, microbatch: int, slot: GraphedMicrobatch, grads: Grads) -> GraphedHalf | None:
        pool = self._flights[microbatch].number if name == "I" else _SHARED
        draws = self._calls.draws.on_gpu if self.remat == "layer" and name != "W" else ()
        try:
            edges = (edge for cell in self._cells for edge in cell.edges(microbatch))
            fixed, low = fixed_grads(grads), LowGrads(edges, self._work[microbatch].records)
            with grads_aside(self.parameters(), low) as added:
                replay, found = self._captured(lambda: low.joined(self._backward(name, microbatch, fixed)), pool, draws)
            slot.halves[name] = GraphedHalf(replay, fixed, found, added)
        except Exception as error:
            self._failed(error, pool)
        return slot.halves.get(name)

    def _backward(self, name: str, microbatch: int, grads: Grads) -> Grads:
        found: Grads = [] if name == "W" else super().backward_input(microbatch, grads)
        if name != "I":
            super().backward_weight(microbatch)
        return found

    def _judge(self, flight: Flight, slot: GraphedMicrobatch, halves: Sequence[str]) -> None:
        if (trial := flight.trial) is None:
            return
        given, asked = slot.halves[halves[0]].again(), self._kept(flight.asked_again())
        replayed = partial(slot.replayed, halves, self._seed(flight), self.parameters())

        def eagerly() -> Any:
            handed = self._eagerly(flight.shadow, asked)
            with grads_aside(self.parameters()) as added:
                found = self._backward("B", flight.shadow, given)
            return handed, found, [each for _, each in added]

        if (why := trial.verdict(eagerly, replayed, faster=self.tried)) is not None:
            self.likenesses.give_up(why)

    def _run_again(self, name: str, microbatch: int, flight: Flight, grads: Grads) -> None:
        """The forward, eagerly, and for a W the half before it, which has added its part already."""
        assert flight.slot is not None
        if name not in flight.slot.halves:  # and never will be: the graph that it starts from is gone
            flight.like.slots.pop(flight.number, None)
            self._pools.pop(flight.number, None)
        if microbatch in self._work:
            self._forget(microbatch)
        self._leave(microbatch)
        self._eagerly(microbatch, self._kept(flight.asked_again()))
        if name == "W":
            with grads_aside(self.parameters()):
                super().backward_input(microbatch, flight.slot.halves["I"].again())

    def _why_not(self) -> str | None:
        if self.likenesses.foreign:
            return "it trains a parameter that none of its layers has"
        if self._shared:
            return "another stage uses one of its weights too"
        if any(cell.changing for cell in self._cells):
            return "a layer changes a buffer"
        found = why_no_call(self._calls) or why_not(self.likenesses.parts, self.parameters())
        return why_too_large(self.parameters()) if found is None and self.tried and not self._pools else found

    def _seed(self, flight: Flight) -> Callable[[int], int]:
        asked, calls = flight.asked, self._calls
        return lambda layer: seed_of(calls.draws.seed, asked.step, calls.first_microbatch + asked.place, layer)

    def _failed(self, error: Exception, number: int) -> None:
        self._pools.pop(number, None)  # it may have ended with the graph that was to be its first
        self.likenesses.failed(error)

    def _leave(self, microbatch: int, over: bool = False) -> None:
        """It is no longer under way as graphs; `over`: it has got to its end."""
        flight = self._flights.pop(microbatch)
        if flight.slot is not None:
            self._free.add(flight.number)
        if flight.trial is not None:
            if flight.shadow in self._work:
                self._forget(flight.shadow)
            flight.trial.over = over
            if not over:
                flight.like.trial = None

    def finish(self, *, resting: bool = True) -> None:
        super().finish(resting=resting)
        self.likenesses.end()

    def drop(self, *, resting: bool = True) -> None:
        for microbatch, flight in list(self._flights.items()):
            if microbatch in self._work and flight.slot is not None:  # captured in part
                flight.like.slots.pop(flight.number, None)
                self._pools.pop(flight.number, None)  # it may end with its graphs
            self._leave(microbatch)
        super().drop(resting=resting)
        self.likenesses.end()
