"""What a stage keeps of a microbatch from its forward to the end of its backward."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gapless.errors import GaplessError
from gapless.guards.passed_tensors import CHANGED_VIEWS
from gapless.guards.weights_and_gradients import NOTHING_TO_TRAIN
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.aliases import has_history
from gapless.stage.batch.plain import detach, without_loss
from gapless.stage.batch.view_bases import NO_VIEWS, Base, Viewed, base_of, late_views, mark_view, nodes_of
from gapless.stage.guards.changing_buffers import Taken
from gapless.stage.guards.state.state_notes import Note
from gapless.stage.offload.saved_storages import SavedStorages
from gapless.stage.shared.tie import Place, Tie
from gapless.stage.split.deferred import Records, given
from gapless.stage.split.reached_parameters import Reached

from .autocast import AutocastState

_GRAD = attrgetter("grad")
_NO_BASE = (
    "a layer changes its input in place; it comes from another stage and is a view of a tensor of another type there, "
    "so its gradient can't go where it goes in plain training"
)
_USED_BETWEEN = (
    "a layer changes its input in place; it is a view that was made some stages before, and a stage between uses it "
    "too, so its gradients would be added in another order than in plain training"
)
_LATE = (
    "a layer changes a tensor in place and hands it on with views that were made before; their gradients would be "
    "added in another order than in plain training"
)


@dataclasses.dataclass(slots=True)
class Work:
    """One microbatch on its way through a stage."""

    microbatch: int  # by which it is known
    step: int
    place: int  # among the microbatches of the step, for seeds
    target: Any
    weight: float | Tensor
    want_outputs: bool
    defer: bool  # will the halves of its backward be called apart
    records: Records
    keep: bool = False  # keep the graph even where the stage recomputes: its backward comes at once
    must_train: bool = False  # its loss has to depend on something that requires a gradient
    replaying: bool = False
    saved: SavedStorages | None = None  # what of it may be in the host's memory
    deferred: Mapping[int, Any] = dataclasses.field(default_factory=dict)  # parameters whose gradients wait, by id


@dataclasses.dataclass(slots=True)
class Kept:
    """What a cell keeps of a microbatch. `edges` are those of the outputs, or of the weighted loss; None: to be
    recomputed.
    """

    leaves: list[Tensor]  # those of views last
    shape: mb.Shape | None
    edges: list[GradientEdge | None] | None = None
    starts: list[Tensor] = dataclasses.field(default_factory=list)  # with the loss: the gradients of `edges`
    autocast: AutocastState | None = None
    buffers: Taken = dataclasses.field(default_factory=list)  # as they were, for the second run
    before: list[Note] = dataclasses.field(default_factory=list)  # what layers held then, of what changes
    after: list[Note] = dataclasses.field(default_factory=list)  # and what its forward has left, for the backward
    # Gradients laid out in another way than their leaf, which `.grad` would not keep: whoever sums them next would sum
    # in another order.
    as_they_came: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    bare: bool = False  # of layers that do the same every time
    graph: tuple[bool, int] | None = None  # whether gradients wait, and how many nodes it has
    looked_at: bool = False  # as it may differ from others with as many
    known_ties: tuple[Tie, ...] = ()  # when its forward ran
    casts: dict[Tie, Any] = dataclasses.field(default_factory=dict)  # autocast's nodes for shared parameters
    together: bool = False  # gradients of views meet at what they are views of: a layer changes one in place
    views: tuple[int, ...] = ()  # leaves that were views where they were made
    late: Sequence[Collection[int]] = ()  # outputs of one base, some of them views whose nodes were not there yet
    changed: Collection[int] = ()  # of these: changed in place, so their gradients are for their bases
    bases: Mapping[int, Base | None] = dataclasses.field(default_factory=dict)  # of outputs that are views

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        shape: mb.Shape | None,
        autocast: AutocastState | None = None,
        *,
        together: bool = False,
    ) -> "Kept":
        """For these inputs."""
        views: tuple[int, ...] = ()
        leaves = []
        for number, tensor in enumerate(tensors):
            leaves.append(tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach())
            if getattr(tensor, "was_view", False):
                views = (*views, number)
        return cls(leaves, shape, autocast=autocast, together=together, views=views)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """What the layers get, with these for its leaves."""
        if self.shape is None:
            return tensors[0]
        count = len(self.shape.tensors)
        return mb.unflatten(tensors[:count], self.shape, () if self.together else self.leaves[count:])

    def hand_on(self, tensors: Sequence[Tensor], views: Sequence[Tensor], viewed: Viewed, start: int) -> list[Tensor]:
        """The outputs, cut off from the graph, whose edges are noted; those of views of them too. Whoever asks for the
        node of a view after its base was changed in place makes it: `start` is how many there were before we did.
        """
        self.edges = [get_gradient_edge(tensor) if has_history(tensor) else None for tensor in (*tensors, *views)]
        if views:
            self.late = late_views([*tensors, *views], self.edges, start)
        handed, bases = [leaf_of(tensor) for tensor in tensors], {}
        for number, tensor in enumerate(tensors):
            if self.edges[number] is not None and (viewed is not NO_VIEWS or tensor._is_view()):
                is_view, base = base_of(tensor, viewed)
                if is_view:
                    bases[number] = base
                    mark_view(handed[number])
        self.bases = bases
        return handed

    def end(self, work: Work, outputs: Any, loss: Tensor, aux: Tensor | None) -> tuple[Any, Tensor]:
        """The last layer has run: the backward starts at the weighted loss. Returns what is handed to the caller."""
        loss = loss if aux is None else loss + aux
        weight, start = work.weight, 1.0
        if type(weight) is not float:
            weighted = [loss * weight]
        elif weight:  # the gradient of loss * weight is the weight, to the bit
            weighted, start = [loss], weight
        else:
            weighted = without_loss(outputs, aux)
        self.edges, self.starts = [], []
        for tensor in weighted:
            if tensor.requires_grad:
                self.edges.append(get_gradient_edge(tensor))
                self.starts.append(torch.full_like(tensor, start))
        if work.must_train and not self.edges and (type(weight) is not float or weight) and torch.is_grad_enabled():
            raise NOTHING_TO_TRAIN.refusal("the loss depends on no tensor that requires a gradient")
        return detach(outputs) if work.want_outputs else None, loss.detach()

    def backward_starts(
        self, grads: list[Tensor | None], *, with_loss: bool
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """Where the backward starts, and with what."""
        assert self.edges is not None
        if any(sum(grads[number] is not None for number in numbers) > 1 for numbers in self.late):
            raise CHANGED_VIEWS.refusal(_LATE)
        if self.bases and any(grad is not None and grad.requires_grad for grad in grads):
            grads = self._to_bases(grads)
        if len(grads) == 1 == len(self.edges) and grads[0] is not None and self.edges[0] is not None:
            return self.edges, grads  # type: ignore[return-value]
        if with_loss:
            return self.edges, self.starts  # type: ignore[return-value]  # edges that are there
        if len(grads) != len(self.edges):
            raise GaplessError(
                f"{len(grads)} gradients came for {len(self.edges)} outputs: "
                "give one, or None, for each tensor of the outputs."
            )
        pairs = [
            (edge, grad) for edge, grad in zip(self.edges, grads, strict=True) if edge is not None and grad is not None
        ]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _to_bases(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Other stages have changed some of the outputs in place: the gradients of these go to their bases."""
        assert self.edges is not None
        edges, found = list(self.edges), list(grads)
        marked = {number for number, grad in enumerate(grads) if grad is not None and grad.requires_grad}
        for number in marked:
            base, grad = self.bases.get(number), grads[number]
            if base is None or grad is None:
                raise CHANGED_VIEWS.refusal(_NO_BASE)
            edges[number], found[number] = base.edge, base.grad(grad)
            if base.source is not None:  # itself an input, so the gradient goes on to the stage before
                others = [edge for other, edge in enumerate(self.edges) if other != number and grads[other] is not None]
                if get_gradient_edge(self.leaves[base.source]).node in nodes_of(others):
                    raise CHANGED_VIEWS.refusal(_USED_BETWEEN)
                self.changed = {*self.changed, base.source}
        self.edges, self.looked_at = edges, True
        return found

    def find_casts(self, ties: Iterable[Tie]) -> None:
        """Of those that were not known to be shared when the forward ran."""
        nodes = Reached(self.edges or ()).cast_nodes
        for tie in ties:
            if tie not in self.known_ties and id(tie.parameter) in nodes:
                self.casts[tie] = nodes[id(tie.parameter)]

    def layout(self, starts: Sequence[Tensor], target: Any) -> Any:
        """What decides how the gradients of the leaves are laid out, or None where they must be looked at: to have that
        done in every backward costs as much as a small layer.
        """
        if not starts or self.looked_at or (target is not None and type(target) is not Tensor):
            return None
        known = (*self.leaves, *starts) if target is None else (*self.leaves, *starts, target)
        found: list[Any] = [self.graph]
        for each in known:
            if each.layout is not torch.strided or each.is_nested:
                return None
            found += each.shape, each.stride(), each.requires_grad
        return tuple(found)

    def seeds(
        self, work: Work, tie: Tie, place: Place, deferring: Collection[int], hooks: ExitStack
    ) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Where the sums that later places have added up for a shared parameter go on."""
        parameter = tie.parameter
        waits = id(parameter) in work.deferred
        if work.defer and tie.may_wait(place):  # a microbatch that skips it keeps its turn among those whose W adds it
            waits = waits or id(parameter) in deferring
        cast = self.casts.get(tie) if tie.shares_cast(place) and not waits else None
        high, low = tie.goes_on(place, work.microbatch, cast, hooks, waits=waits)
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

    def watch_layouts(self) -> None:
        """Before the backward: keep gradients as they come."""
        for number, leaf in enumerate(self.leaves):
            if leaf.requires_grad:
                leaf.register_hook(functools.partial(_note_layout, self.as_they_came, number, leaf.stride()))

    def grads(self) -> list[Tensor | None]:
        """The gradients of the inputs, after the backward."""
        if not self.as_they_came and not self.changed:
            return [*map(_GRAD, self.leaves)]
        found = [self.as_they_came.get(number, leaf.grad) for number, leaf in enumerate(self.leaves)]
        return [
            grad if grad is None or number not in self.changed else grad.detach().requires_grad_()
            for number, grad in enumerate(found)
        ]


def _bare_edge(tensor: Tensor) -> GradientEdge:
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


# The gradient edge of a tensor that is no leaf. Before torch 2.13 the node of a Python function did not keep its graph
# alive, so `get_gradient_edge` adds one that does; since then to make it costs as much as the function.
edge_of = get_gradient_edge if torch.__version__ < "2.13" else _bare_edge


def leaf_of(tensor: Tensor) -> Tensor:
    """The same data without its history, marked if a gradient for it is wanted."""
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor.detach()


def _note_layout(as_they_came: dict[int, Tensor], number: int, stride: tuple[int, ...], grad: Tensor | None) -> None:
    if grad is not None and grad.stride() != stride:
        as_they_came[number] = grad
