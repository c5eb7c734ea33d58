"""What has one autograd graph and is rebuilt at once: all layers of a stage or, with remat="layer", one of them.

A cell keeps for each microbatch its inputs, as leaves whose `.grad` the backward fills, and the gradient edges of its
outputs. It does not keep the outputs: what was handed on must be free to die.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gapless.errors import ConfigError, GaplessError

from . import microbatch as mb
from .autocast import AutocastState, autocast_is_on, casts_are_kept
from .auxiliary import Added, WithAux
from .buffers import Buffers, Taken
from .calls import Calls
from .deferred import Records, given
from .intercept import Restart
from .plain import without_loss
from .reach import Reached
from .tie import Place, Tie, running

Stray = Callable[[Place, Tensor], None]

_TWICE = "backward through the graph a second time"
_STORED = (
    "A tensor that one stage has stored and another one uses, or the next microbatch, leads here: return it from the "
    "layer with its output, detach it, or add it to the loss with gapless.aux_loss."
)
_ON_META = "device meta"  # what belongs to another process is there
_IN_PLACE_ON_LEAF = "leaf Variable that requires grad"


@dataclasses.dataclass(slots=True)
class Work:
    """One microbatch on its way through a stage."""

    microbatch: int
    step: int
    target: Any
    weight: float | Tensor
    want_outputs: bool
    defer: bool  # will the halves of its backward be called apart
    records: Records
    keep: bool = False  # keep the graph even where the stage recomputes: its backward comes at once
    replaying: bool = False
    deferred: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # parameters whose gradients wait, by id


@dataclasses.dataclass(slots=True)
class Kept:
    """What a cell keeps of a microbatch. `edges` are those of the outputs, or of the weighted loss; None: to be
    recomputed.
    """

    leaves: list[Tensor]
    shape: mb.Shape | None
    edges: list[GradientEdge | None] | None = None
    starts: list[Tensor] = dataclasses.field(default_factory=list)  # with the loss: the gradients of `edges`, ones
    autocast: AutocastState | None = None
    buffers: Taken = dataclasses.field(default_factory=list)  # as they were, for the second run
    # Gradients laid out in another way than their leaf, which `.grad` would not keep: whoever sums them next would sum
    # in another order.
    as_they_came: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    bare: bool = False  # of layers that do the same every time
    casts: dict[Tie, Any] = dataclasses.field(default_factory=dict)  # autocast's nodes for shared parameters

    @classmethod
    def of(cls, tensors: Sequence[Tensor], shape: mb.Shape | None, autocast: AutocastState | None = None) -> Kept:
        """For these inputs."""
        return cls([leaf_of(tensor) for tensor in tensors], shape, autocast=autocast)

    def watch_layouts(self) -> None:
        """Before the backward: keep gradients as they come."""
        for number, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(_note_layout, self.as_they_came, number, leaf.stride()))

    def grads(self) -> list[Tensor | None]:
        """The gradients of the inputs, after the backward."""
        if not self.as_they_came:
            return [leaf.grad for leaf in self.leaves]
        return [self.as_they_came.get(number, leaf.grad) for number, leaf in enumerate(self.leaves)]


class Cell:
    """Some consecutive layers with one graph per microbatch."""

    remakes = False  # whether it runs its layers again for the backward

    def __init__(self, calls: Calls, layers: range, number: int, *, with_loss: bool) -> None:
        self._calls = calls
        self._layers = layers
        self._buffers = Buffers(calls.parts_of(layers, with_loss=with_loss), always=self.remakes)
        self._with_loss = with_loss
        self._kept: dict[int, Kept] = {}
        # True once a layer was seen to change the cell's input in place, which torch forbids on a leaf.
        self._guarded = False
        self._tried = False  # a run has told
        self._layouts: set[Any] = set()  # of inputs and gradients, for which bare layers keep the layout of the input
        self._place: Place = (0, number)
        self._ties: tuple[Tie, ...] = ()
        self._step = -1
        self._cast_anew: tuple[Tie, ...] = ()  # in this step; one that is found in the middle of it waits for the next
        self._deferring: set[int] = set()  # parameters, by id, whose gradients wait for a W in this step
        self._own: set[Tensor] = set()
        self._stray: Stray | None = None
        self._casts_input = False  # a layer casts the input in an autocast of its own
        self._next_look = [0, 0]  # the step after which the graph is walked again: without deferral, with it

    def tie(self, stage: int, ties: Sequence[Tie], stray: Stray | None) -> None:
        """Tells the cell which of its parameters other places use too, and whom to tell of those that it should not
        know.
        """
        self._own = set(self._calls.parameters_of(self._layers, with_loss=self._with_loss))
        self._place = (stage, self._place[1])
        self._ties = tuple(each for each in ties if each.parameter in self._own)
        self._stray = stray
        self._next_look = [0, 0]
        self._step = -1
        for each in self._ties:
            each.settle(*self._place)

    @property
    def moves_buffers(self) -> bool:
        """Whether a forward was seen to leave buffers behind that the next one starts from."""
        return bool(self._buffers.changing) or self._calls.statistics.moves

    def owns(self, parameter: Tensor) -> bool:
        """Whether it is one of its layers or of its loss."""
        return parameter in self._own

    def join(self, tie: Tie) -> None:
        """One more that other places use too."""
        self._ties = (*self._ties, tie)
        tie.join(self._place)

    def forward(self, work: Work, inputs: Any, then: Callable[[Any], None] | None = None) -> Any:
        """Runs the layers, keeps the graph, returns the outputs cut off from it, and calls `then` with them."""
        if type(inputs) is Tensor and (layers := self._calls.bare()) is not None and not autocast_is_on():
            return self._run_bare(work, layers, inputs, then)
        tensors, shape = mb.flatten(inputs)
        kept = Kept.of(tensors, shape)
        handed = self._build(work, kept)
        if then is not None:
            then(handed)
        self._kept[work.microbatch] = kept
        return handed

    def _run_bare(
        self,
        work: Work,
        layers: Sequence[Callable[..., Any]],
        tensor: Tensor,
        then: Callable[[Any], None] | None,
    ) -> Any:
        """`forward` for layers that need no watching: on small tensors the care would cost as much as the work."""
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaf.requires_grad_()
        value: Any = copied(leaf) if self._guarded and leaf.requires_grad else leaf
        version, first = value._version, value
        try:
            for layer in layers:
                value = layer(value)
        except RuntimeError as error:
            if self._guarded or _IN_PLACE_ON_LEAF not in str(error):
                raise
            self._guarded = True
            return self._run_bare(work, layers, tensor, then)
        kept = self._kept[work.microbatch] = Kept([leaf], None, bare=True)
        if type(value) is Tensor and (node := value.grad_fn) is not None and then is not None:
            handed = value.detach().requires_grad_()
            then(handed)
            kept.edges = [GradientEdge(node, value.output_nr)]
        else:
            handed = self._hand_on(kept, value)
            if then is not None:
                then(handed)
        if first._version != version:
            self._guarded = True
        return handed

    def recompute(self, work: Work) -> None:
        """Nothing to do: this cell keeps its graph."""

    def backward(
        self, work: Work, grads: list[Tensor | None], then: Callable[[Any], None] | None = None
    ) -> list[Tensor | None]:
        """The gradients of the inputs from those of the outputs. Weight gradients are added to `.grad` or recorded."""
        kept = self._kept.pop(work.microbatch)
        edges, starts = self._starts(kept, grads)
        layout = None
        if kept.bare and starts:
            leaf, grad = kept.leaves[0], starts[0]
            layout = leaf.shape, leaf.stride(), grad.shape, grad.stride()
        if layout not in self._layouts:
            kept.watch_layouts()
        try:
            if self._ties:
                self._backward_tied(work, kept, edges, starts)
            elif edges:
                self._calls.backward(work.records, edges, starts)
        except RuntimeError as error:
            if _TWICE in str(error):
                error.add_note(_STORED)
            raise
        found = kept.grads()
        if then is not None:
            then(found)  # before the graph is taken down
        if layout is not None and not kept.as_they_came:
            self._layouts.add(layout)
        return found

    def _backward_tied(self, work: Work, kept: Kept, edges: list[GradientEdge], starts: list[Tensor]) -> None:
        """Gradients of shared parameters go on from what later places have added up."""
        edges, starts = [*edges], [*starts]
        with contextlib.ExitStack() as hooks:
            for each in self._ties:
                for edge, grad in self._seeds(work, kept, each, hooks):
                    edges.append(edge)
                    starts.append(grad)
            if edges:
                with running(self._place, work.microbatch, edges, starts[0].device):
                    self._calls.backward(work.records, edges, starts)
        for each in self._ties:
            each.passed(self._place, work.microbatch)

    def _seeds(
        self, work: Work, kept: Kept, tie: Tie, hooks: contextlib.ExitStack
    ) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Where the sums of later places go on. In a place before which others use the same cast of autocast's, what
        arrives there is caught.
        """
        place, parameter = self._place, tie.parameter
        high, low = tie.brought(place, work.microbatch)
        waits = id(parameter) in work.deferred
        if work.defer and tie.is_first(place):  # a microbatch that skips it keeps its turn among those whose W adds it
            waits = waits or id(parameter) in self._deferring
        cast = None
        if tie.shares_cast(place) and not waits:
            cast = kept.casts.get(tie)
        if cast is not None and not tie.is_first_to_cast(place):
            catch = functools.partial(_catch_low, tie, place, work.microbatch)
            hooks.callback(cast.register_prehook(catch).remove)
        if low is not None and cast is None and not waits:
            if tie.is_first(place):
                cast_now = low.to(parameter.dtype)
                high = cast_now if high is None else high + cast_now
            else:
                tie.catch_low(place, work.microbatch, low)
            low = None
        if waits:
            work.records[:0] = [
                (parameter, given, sums, None, is_low)
                for sums, is_low in ((high, False), (low, True))
                if sums is not None
            ]
            return
        if high is not None:
            yield get_gradient_edge(parameter), high
        if low is not None and cast is not None:
            yield GradientEdge(cast, 0), low

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch."""
        self._kept.pop(microbatch, None)

    def _starts(self, kept: Kept, grads: list[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward starts, and with what."""
        assert kept.edges is not None
        if len(grads) == 1 == len(kept.edges) and grads[0] is not None and kept.edges[0] is not None:
            return kept.edges, grads  # type: ignore[return-value]
        if self._with_loss:
            return kept.edges, kept.starts  # type: ignore[return-value]  # edges that are there
        if len(grads) != len(kept.edges):
            raise GaplessError(
                f"{len(grads)} gradients came for {len(kept.edges)} outputs: "
                "give one, or None, for each tensor of the outputs."
            )
        pairs = [
            (edge, grad) for edge, grad in zip(kept.edges, grads, strict=True) if edge is not None and grad is not None
        ]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _build(self, work: Work, kept: Kept, *, defer: bool = True) -> Any:
        """Runs the layers on the leaves and notes the edges, and again where what was learnt on the way changes the
        beginning.
        """
        self._calls.statistics.enter(work.microbatch, replaying=work.replaying)
        while True:
            cast = self._casts_input or autocast_is_on()
            tensors = [self._changeable(leaf, cast=cast) for leaf in kept.leaves]
            versions = [tensor._version for tensor in tensors]
            was_copied = self._guarded or not self._tried
            taken = self._buffers.taken()
            try:
                handed = self._run(work, kept, mb.unflatten(tensors, kept.shape), defer=defer)
            except Restart:
                self._buffers.put_back(taken)
                continue
            except RuntimeError as error:
                if _ON_META in str(error):
                    raise ConfigError(
                        f"a layer or the loss of stage {self._place[0]} uses the weights of a stage in another "
                        "process, and their values are not here: use them in a layer of that stage, or, for a penalty "
                        "on weights, give the optimizer weight_decay"
                    ) from error
                if self._guarded or _IN_PLACE_ON_LEAF not in str(error):
                    raise
                self._buffers.put_back(taken)
                self._guarded = True
                continue
            kept.buffers = self._buffers.learn(taken)
            self._note_changes(versions != [tensor._version for tensor in tensors], seen=was_copied or not cast)
            return handed

    def _changeable(self, leaf: Tensor, *, cast: bool) -> Tensor:
        """The leaf as the layers get it: as it is, or as the result of an operation, which it is in the plain loop.

        torch forbids to change a leaf in place, so a layer that does gets a copy, and the stage before keeps what it
        has saved. Autocast caches the cast of a leaf but not that of a result, so that gradients of several uses
        would be summed in another precision.
        """
        if not leaf.requires_grad or not (self._guarded or cast):
            return leaf
        if self._guarded or not self._tried:
            return copied(leaf)
        result: Tensor = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
        if result.stride() != leaf.stride():  # of a dimension of size one, by which kernels are chosen too
            result = torch.ops.aten.alias.default(leaf)
        return result

    def _note_changes(self, changed: bool, *, seen: bool) -> None:
        """Learns from a run whether the layers change their input."""
        if changed and not seen:
            raise GaplessError(
                "a layer changed its input in place that had not done so before, under autocast, where that can't be "
                "undone: let it make a new tensor."
            )
        self._tried = True
        self._guarded = self._guarded or changed

    def _run(self, work: Work, kept: Kept, value: Any, *, defer: bool) -> Any:
        calls = self._calls
        value, aux, stored = value if type(value) is WithAux else (value, None, ())
        if stored:
            calls.stored.set_elsewhere(stored)
        layers = functools.partial(calls.parts_of, self._layers, with_loss=False)
        watch = calls.stored.watch(self, work.step, layers, seen=not calls.num_compiled)
        defer = defer and work.defer
        if work.step != self._step:
            self._step, self._cast_anew = work.step, self._ties
            self._deferring.clear()
        if self._cast_anew and casts_are_kept():
            for each in self._cast_anew:
                calls.cast_anew(each.parameter)
        with calls.begin(work.records if defer else None, work.step, work.microbatch), Added() as added, watch:
            for index in self._layers:
                value = calls.layer(index, value)
            if not self._with_loss:
                aux, stored = added.to(aux), (*stored, *watch.told())
                handed = self._hand_on(kept, WithAux(value, aux, stored) if stored or aux is not None else value)
            else:
                loss = calls.loss(value, work.target)
                check_scalar(loss)
                aux = added.to(aux)
                loss = loss if aux is None else loss + aux
                uncounted = type(work.weight) is float and not work.weight
                weighted = without_loss(value, aux) if uncounted else [loss * work.weight]
                kept.edges = [get_gradient_edge(tensor) for tensor in weighted if tensor.requires_grad]
                kept.starts = [torch.ones_like(tensor) for tensor in weighted if tensor.requires_grad]
                handed = self._outputs(value) if work.want_outputs else None, loss.detach()
        if work.step >= self._next_look[defer]:
            self._look(kept)
            self._next_look[defer] = max(work.step + 1, 2 * work.step)
        if defer:  # this run's own, so it need not be copied
            work.deferred = {**work.deferred, **calls.deferred} if work.deferred else calls.deferred
            self._deferring.update(calls.deferred)
        if self._cast_anew and casts_are_kept():
            kept.casts = {each: calls.casts[each.parameter] for each in self._ties if each.parameter in calls.casts}
            for each in self._cast_anew:
                if each in kept.casts or calls.deferred.get(id(each.parameter), (None, False))[1]:
                    each.casts(self._place)
        return handed

    def _look(self, kept: Kept) -> None:
        """Walks the graph for parameters that are used in a way that nobody told: one whose gradient waits and arrives
        now too, and one of another place.
        """
        calls, found = self._calls, Reached(kept.edges or ())
        if both := [each for each in found.parameters if id(each) in calls.deferred]:
            calls.exclude(both)
            raise Restart
        used = dict.fromkeys([*found.parameters, *(each for each, _ in calls.deferred.values())])
        if self._stray is not None:
            known = {*self._own, *(tie.parameter for tie in self._ties)}
            for each in used:
                if each not in known:
                    self._stray(self._place, each)
            if any(id(tie.parameter) in calls.deferred and not tie.is_first(self._place) for tie in self._ties):
                raise Restart
        if not self._casts_input and any(leaf in found.casts for leaf in kept.leaves):
            self._casts_input = True
            raise Restart
        if casts_are_kept():
            self._look_at_casts(found)

    def _look_at_casts(self, found: Reached) -> None:
        """Autocast keeps one cast of a parameter, for all microbatches and threads. Where the order of more than two
        contributions depends on it, every forward must make the cast anew, as it does where other places use it too.
        Two are enough: a penalty in the loss may turn out to be the third.
        """
        often = [parameter for parameter in found.casts if found.uses[parameter] > 1]
        news = [self._calls.cast_anew(parameter) for parameter in often]
        if any(news):
            raise Restart

    def _hand_on(self, kept: Kept, value: Any) -> Any:
        tensors, shape = mb.flatten(value)
        kept.edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
        return mb.unflatten([leaf_of(tensor) for tensor in tensors], shape)

    def _outputs(self, value: Any) -> Any:
        tensors, shape = mb.flatten(value)
        return mb.unflatten([tensor.detach() for tensor in tensors], shape)


class _Copied(torch.autograd.Function):
    """A copy laid out as the tensor itself; its gradient is passed on as it comes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, layout=tensor.layout
        ).copy_(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, those of dimensions of size one included: kernels are chosen by them. Where
    elements share memory they can't be the same.
    """
    copy = tensor.clone()
    if copy.stride() == tensor.stride() or 0 in tensor.stride():
        return copy
    made: Tensor = _Copied.apply(tensor)  # type: ignore[no-untyped-call]
    return made


def leaf_of(tensor: Tensor) -> Tensor:
    """The same data without its history, marked if a gradient for it is wanted."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach()


def _catch_low(tie: Tie, place: Place, microbatch: int, grads: tuple[Tensor | None, ...]) -> tuple[None]:
    if grads[0] is not None:
        tie.catch_low(place, microbatch, grads[0])
    return (None,)


def _note_layout(as_they_came: dict[int, Tensor], number: int, stride: tuple[int, ...], grad: Tensor) -> None:
    if grad.stride() != stride:
        as_they_came[number] = grad


def check_scalar(loss: Any) -> None:
    """Of anything else there is no gradient."""
    if not isinstance(loss, Tensor):
        raise GaplessError(f"the loss must return a scalar tensor, and returned a {type(loss).__name__}.")
    if loss.dim() != 0:
        raise GaplessError(
            f"the loss must be a scalar, and has the shape {tuple(loss.shape)}: reduce it, with mean() for example."
        )
