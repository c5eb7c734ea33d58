"""A parameter that several stages use: an embedding and the head that shares its weight.

The plain loop adds up the contributions of one microbatch in autograd's order, from the last use to the first, and
accumulates the sum once. Stages run their backwards of one microbatch in that very order, so each hands its sum to the
stage before it, which goes on adding where that one stopped, and the first one accumulates:

    stage 3:  c = g3          stage 1:  c = c + g1          stage 0:  .grad += c + g0

So only one stage writes `.grad`, in microbatch order, and a sum waits no longer than from one backward to the next.
Where several cells of one stage (`remat="layer"`) use it, they are such places too. Autocast casts a parameter once for
all uses: what arrives at the cast is summed in the lower precision, and cast where the first of these uses is, so that
sum is handed on beside the other. With `summed` each stage adds up its own over all microbatches, and the sums meet at
the end of the step.

Where the stages are in several processes, each has its copy of the parameter. What one hands to another goes through
`Away`, and at the end of the step the first stage's process, the home, hands its gradient to all others.
"""

import functools
from collections.abc import Container, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from gapless.guards.weights_and_gradients import GRADIENT_HOOKS, TIED_GRADIENTS
from gapless.stage.split.deferred import add_grad
from gapless.stage.split.graph_task import Running

Tied = Literal["exact", "summed"]
Place = tuple[int, int]  # a stage, and which of its cells
Now = tuple[Place, int]  # and the microbatch


running: Running[Now] = Running()  # around a backward: whose gradients of shared parameters arrive


class Sums(NamedTuple):
    """What later places have added up for a microbatch: in the parameter's own precision, and in autocast's."""

    high: Tensor | None = None
    low: Tensor | None = None


class Away(Protocol):
    """The stages of other processes, for one shared parameter."""

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""

    def hand(self, stage: int, microbatch: int, sums: Sums) -> None:
        """Give sums to a stage elsewhere, or word that there are none. Does not wait."""

    def take(self, stage: int, microbatch: int) -> Sums:
        """What a stage elsewhere has handed over."""


class Tie:
    """One shared parameter, the places that use it, and what is under way between them."""

    def __init__(
        self, name: str, parameter: Parameter, stages: Sequence[int], tied: Tied, away: Away | None = None
    ) -> None:
        self.name = name
        self.parameter = parameter
        self._places: list[Place] = [(stage, 0) for stage in sorted(stages)]
        self.is_home = away is None or not self._places or away.is_here(self._places[0][0])
        self._casters: set[Place] = set()  # places of this process that use autocast's cast of it
        self._without: set[Now] = set()  # and where one of them did not, as its data decide
        self._summed = tied == "summed"
        self._away = away
        self._caught: dict[Now, Sums] = {}
        self._carried: dict[int, tuple[Sums, Any]] = {}  # and on an accelerator the event after which it is there
        self._sums: dict[int, Tensor] = {}  # by stage
        self._held: dict[int, Tensor] | None = None  # by microbatch: what the first place adds when the step ends
        self._node: Any = None
        self._handle: Any = None

    @property
    def followers(self) -> list[int]:
        """The stages of all places but the first: there no gradient may wait."""
        return [stage for stage, _ in self._places[1:]]

    @property
    def stages(self) -> list[int]:
        """Those that use it."""
        return sorted({stage for stage, _ in self._places})

    def settle(self, stage: int, cell: int) -> None:
        """This cell of the stage uses it."""
        self._places = sorted({(stage, cell) if place == (stage, 0) else place for place in self._places})

    def join(self, place: Place) -> None:
        """A place that was seen to use it too."""
        self._places = sorted({*self._places, place})

    def is_first(self, place: Place) -> bool:
        """Whether nothing uses it before this place: here the gradient is accumulated."""
        return place == self._places[0]

    def may_wait(self, place: Place) -> bool:
        """Whether the gradient may wait for a W there."""
        return self.is_first(place) and self._held is None

    def hold(self) -> None:
        """In the middle of a step a place was found before others whose gradients wait: those come before all that
        arrives from now on, which is added when the step ends.
        """
        self._held = {} if self._held is None else self._held

    def casts(self, place: Place, microbatch: int, used: bool) -> None:
        """Whether this place has used autocast's cast of the parameter in the forward of this microbatch."""
        if used:
            self._casters.add(place)
            self._without.discard((place, microbatch))
        else:
            self._without.add((place, microbatch))

    def may_cast(self, casts: Container[int]) -> bool:
        """A place was found in the middle of a step. If it is one of the parameters, by id, of which casts are used
        there, other places may use one too, whose forwards are over.
        """
        if id(self.parameter) in casts:
            self._casters.update(self._places)
            return True
        return False

    def shares_cast(self, place: Place) -> bool:
        """Whether this place uses the same cast as others."""
        return place in self._casters and not self._summed and (self._away is not None or len(self._casters) > 1)

    def _is_first_to_cast(self, place: Place, microbatch: int) -> bool:
        """Whether the cast is made in this place, where nobody before it uses it."""
        before = [each for each in self._places if each < place]
        return all(
            (each not in self._casters or (each, microbatch) in self._without) and self._is_here(each[0])
            for each in before
        )

    def begin(self) -> None:
        """A step starts: nothing is under way, and gradients that arrive in other places are caught."""
        self._carried.clear()
        self._caught.clear()
        self._without.clear()
        self._sums.clear()
        self._held = None
        parameter = self.parameter
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise GRADIENT_HOOKS.refusal(
                f"{self.name} is shared by several stages and has a hook, which would see parts of its gradient",
                f"{GRADIENT_HOOKS.way_out}, or choose a partition that keeps its uses in one stage",
            )
        if parameter.requires_grad and self._handle is None:
            self._node = get_gradient_edge(parameter).node
            self._handle = self._node.register_prehook(self._arrived)

    def end(self) -> None:
        """The step is over: sums meet, the last stage's first."""
        self.release()
        if self._summed and not self.is_home:
            for stage in self.stages[:0:-1]:
                if self._is_here(stage):
                    self._hand(self.stages[0], stage, Sums(self._sums.get(stage)))
        elif self._summed:
            self._meet()
        with torch.no_grad():
            for _, grad in sorted((self._held or {}).items()):
                add_grad(self.parameter, grad, shared=True)
        self._held = None
        self._sums.clear()
        self._carried.clear()

    def release(self) -> None:
        """Catches nothing any more, even if the step has failed."""
        if self._handle is not None:
            self._handle.remove()
            self._node = self._handle = None

    def _meet(self) -> None:
        with torch.no_grad():
            for stage in self.stages[:0:-1]:
                total = self._sums.get(stage) if self._is_here(stage) else self._take(stage, stage).high
                if total is not None:
                    add_grad(self.parameter, total)

    def _is_here(self, stage: int) -> bool:
        return self._away is None or self._away.is_here(stage)

    def _hand(self, stage: int, number: int, sums: Sums) -> None:
        assert self._away is not None
        self._away.hand(stage, number, sums)

    def _take(self, stage: int, number: int) -> Sums:
        assert self._away is not None
        return self._away.take(stage, number)

    def _brought(self, place: Place, microbatch: int) -> Sums:
        """What later places have added up for this microbatch: the sum goes on from there."""
        if self._summed:
            return Sums()
        later = next((each for each in self._places if each > place), None)
        if later is not None and not self._is_here(later[0]):
            return self._take(later[0], microbatch)
        if microbatch not in self._carried:
            return Sums()
        sums, event = self._carried.pop(microbatch)
        if event is not None:  # stages have streams of their own
            stream = torch.cuda.current_stream(self.parameter.device)
            stream.wait_event(event)
            for carried in sums:
                if carried is not None:
                    carried.record_stream(stream)
        return sums

    def _arrived(self, grads: tuple[Tensor | None, ...]) -> tuple[None] | None:
        now = running.now()
        grad = grads[0]
        if now is None or grad is None:
            return None
        place, microbatch = now
        stage = place[0]
        if self.is_first(place) or (self._summed and stage == self._places[0][0]):
            if self._held is None:
                return None
            self._held[microbatch] = grad
            return (None,)
        if not self._summed:
            caught = self._caught.get(now, Sums())
            if caught.high is not None:
                raise TIED_GRADIENTS.refusal(
                    f"{self.name} is shared by several stages, and its gradient came twice in one backward, as it does "
                    "from torch.utils.checkpoint with use_reentrant=True"
                )
            self._caught[now] = caught._replace(high=grad)
        elif stage in self._sums:
            self._sums[stage].add_(grad)
        else:
            self._sums[stage] = torch.empty_like(self.parameter).copy_(grad)
        return (None,)

    def goes_on(self, place: Place, microbatch: int, cast: Any, hooks: ExitStack, *, waits: bool) -> Sums:
        """What later places have added up, as this one goes on from it: `cast` is its node of the cast that it shares
        with others, if there is one, and with `waits` the gradient waits. Where places before it use the same cast,
        what arrives there is caught.
        """
        high, low = self._brought(place, microbatch)
        if cast is not None and not self._is_first_to_cast(place, microbatch):
            catch = functools.partial(self._caught_low, place, microbatch)
            hooks.callback(cast.register_prehook(catch).remove)
        if low is not None and cast is None and not waits:
            if self.is_first(place):
                cast_now = low.to(self.parameter.dtype)
                high = cast_now if high is None else high + cast_now
            else:
                self._caught_low(place, microbatch, (low,))
            low = None
        return Sums(high, low)

    def _caught_low(self, place: Place, microbatch: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
        """A sum that goes on to the place where the cast is made."""
        if grads[0] is not None:
            now = (place, microbatch)
            self._caught[now] = self._caught.get(now, Sums())._replace(low=grads[0])
        return (None,)

    def passed(self, place: Place, microbatch: int) -> None:
        """A backward is over: its sums go on to the place before it, which must not wait for ever where that is
        elsewhere.
        """
        self._without.discard((place, microbatch))
        if self._summed or self.is_first(place):
            return
        sums = self._caught.pop((place, microbatch), Sums())
        earlier = max(each for each in self._places if each < place)[0]
        if not self._is_here(earlier):
            self._hand(earlier, microbatch, sums)
        elif sums.high is not None or sums.low is not None:
            device = self.parameter.device
            event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
            self._carried[microbatch] = (sums, event)
