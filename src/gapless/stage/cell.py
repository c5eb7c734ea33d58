"""What has one autograd graph and is rebuilt at once: all layers of a stage or, with remat="layer", one of them.

A cell keeps for each microbatch its inputs, as leaves whose `.grad` the backward fills, and the gradient edges of its
outputs. It does not keep the outputs: what was handed on must be free to die.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.aliases import OWN_CHANGED
from gapless.stage.batch.view_bases import NO_VIEWS, Viewed, base_of, mark_view, was_view
from gapless.stage.guards.changing_buffers import Owned
from gapless.stage.guards.forward_restart import IN_PLACE_ON_LEAF, Undo
from gapless.stage.guards.grad_fields import check_switched
from gapless.stage.guards.stored_tensors import Attributes
from gapless.stage.offload.saved_storages import SavedStorages
from gapless.stage.shared.cell_ties import CellTies
from gapless.stage.split.call_mode import Restart
from gapless.stage.split.deferred import divert
from gapless.stage.split.reached_parameters import nodes_made

from .autocast import autocast_is_on, casts_are_kept
from .auxiliary import WithAux
from .calls import Calls
from .cell_inputs import VERSION, copied, copied_view
from .compiled import is_traced
from .saved_activations import Kept, Work, edge_of

_TWICE = "backward through the graph a second time"
_STORED = (
    "This happens if one stage stores a tensor and another stage, or the next microbatch, uses it: return it from "
    "the layer with its output, detach it, or add it to the loss with gapless.aux_loss."
)


class Cell(CellTies):
    """Some consecutive layers with one graph per microbatch."""

    remakes = False  # whether it runs its layers again for the backward

    def __init__(self, calls: Calls, layers: range, number: int, *, with_loss: bool) -> None:
        super().__init__(calls, layers, number, with_loss=with_loss)
        parts = calls.parts_of(layers, with_loss=with_loss)
        self._undo = Undo(parts, calls.statistics, calls.stored.shared, always=self.remakes)
        self._attributes = Attributes(calls.stored, parts, calls, calls.first_layer + layers.start, apart=self.remakes)
        # Pieces of a trace change nothing in place that another one has, and each view has its gradient there.
        self._shares = not any(is_traced(part) for part in calls.parts_of(layers, with_loss=False))
        self._kept: dict[int, Kept] = {}
        self._viewed = NO_VIEWS
        self._layouts: set[Any] = set()  # of microbatches whose gradients were laid out as their inputs

    @property
    def changing(self) -> Collection[Owned]:
        """The buffers that a forward was seen to change; those of batch norms are counted elsewhere."""
        return self._undo.buffers.changing

    @property
    def holds_state(self) -> bool:
        """Whether a forward was seen to change something else."""
        return self._undo.changes_state

    def forward(self, work: Work, inputs: Any, then: Callable[[Any], None] | None = None) -> Any:
        """Runs the layers, keeps the graph, returns the outputs cut off from it, and calls `then` with them."""
        calls, is_lone = self._calls, type(inputs) is Tensor
        if (
            is_lone
            and calls.bare.exist
            and not autocast_is_on()
            and (layers := calls.bare.now(work.target)) is not None
        ):
            return self._run_bare(work, layers, inputs, then)
        tensors, shape = ([inputs], None) if is_lone else mb.flatten(inputs, views=self._shares)
        leaves = tensors if shape is None else [*tensors, *mb.views_in(inputs, shape)]
        kept = Kept.of(leaves, shape, together=self._intake.together)
        handed = self._build(work, kept)
        if then is not None:
            then(handed)
        self._kept[work.microbatch] = kept
        return handed

    def _run_bare(
        self, work: Work, layers: Sequence[Callable[..., Any]], tensor: Tensor, then: Callable[[Any], None] | None
    ) -> Any:
        """`forward` for layers that need no watching: on small tensors the care would cost as much as the work."""
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaf.requires_grad_()
        value: Any = leaf
        is_view = leaf.requires_grad and was_view(tensor)
        if self._intake.guarded and leaf.requires_grad:
            value = copied_view(leaf) if is_view else copied(leaf)
        version, first = value._version, value
        self._viewed = Viewed([value], [0]) if is_view else NO_VIEWS
        try:
            for layer in layers:
                value = layer(value)
        except RuntimeError as error:
            if self._intake.guarded or IN_PLACE_ON_LEAF not in str(error):
                raise
            self._intake.guarded = True
            return self._run_bare(work, layers, tensor, then)
        kept = self._kept[work.microbatch] = Kept([leaf], None, bare=True)
        if is_view:
            kept.changed = self._viewed.changed(None, self._place[0])
        node = value.grad_fn if type(value) is Tensor else None
        if node is not None and then is not None and not self._with_loss:
            handed = value.detach().requires_grad_()
            if value._is_view():
                mark_view(handed)
            then(handed)
            kept.edges = [edge_of(value)]
            if value._is_view():
                kept.bases = {0: base_of(value, self._viewed)[1]}
        else:
            if self._with_loss:
                handed = kept.end(work, value, self._calls.loss(value, work), None)
            else:
                handed = self._hand_on(kept, value)
            if then is not None:
                then(handed)
        if first._version != version:
            self._intake.guarded = True
        self._viewed = NO_VIEWS
        return handed

    def edges(self, microbatch: int) -> Sequence[GradientEdge | None]:
        """Where the graph of a microbatch begins, if there is one."""
        return (microbatch in self._kept and self._kept[microbatch].edges) or ()

    def recompute(self, work: Work) -> None:
        """Nothing to do: this cell keeps its graph."""

    def kept_leaves(self, microbatch: int) -> list[Tensor]:
        """The inputs that are kept to run the layers again."""
        return []

    def pack(self, microbatch: int, saved: SavedStorages) -> None:
        """These go to the host's memory."""

    def unpack(self, microbatch: int) -> None:
        """And were brought back."""

    def backward(
        self, work: Work, grads: list[Tensor | None], then: Callable[[Any], None] | None = None
    ) -> list[Tensor | None]:
        """The gradients of the inputs from those of the outputs. Weight gradients are added to `.grad` or recorded."""
        kept = self._kept.pop(work.microbatch)
        edges, starts = kept.backward_starts(grads, with_loss=self._with_loss)
        layout = kept.layout(starts, work.target if self._with_loss else None)
        if layout is None or layout not in self._layouts:
            kept.watch_layouts()
        waiting = () if kept.looked_at else self._waiting(work)
        try:
            if kept.after and self._calls.mode.checkpoints:  # these run layers again
                with self._undo.as_left(kept, self._place[0]):
                    self._backward(work, kept, edges, starts)
            elif edges and not self._ties:
                self._calls.backwards.run(work.records, edges, starts)
            else:
                self._backward(work, kept, edges, starts)
        except RuntimeError as error:
            if _TWICE in str(error):
                error.add_note(_STORED)
            raise
        self._check_waiting(waiting)
        found = kept.grads()
        if then is not None:
            then(found)  # before the graph is taken down
        if layout is not None and not kept.as_they_came:
            self._layouts.add(layout)
        return found

    def drop(self, microbatch: int) -> None:
        """Forgets a microbatch."""
        self._kept.pop(microbatch, None)

    def _build(self, work: Work, kept: Kept, *, defer: bool = True) -> Any:
        """Runs the layers on the leaves and notes the edges, and again where what was learnt on the way changes the
        beginning.
        """
        calls, intake, undo, attributes = self._calls, self._intake, self._undo, self._attributes
        leaves, quiet = kept.leaves, work.step < undo.quiet_until
        with attributes.during(work.step):
            calls.enter(work.microbatch, replaying=work.replaying)
            if not quiet:
                undo.entered()
            while True:
                cast = intake.casts or calls.mode.casts_by_itself or autocast_is_on()
                copies = intake.guarded or not intake.tried
                tensors = intake.given(leaves, kept.views, cast=cast) if copies or cast else leaves
                value, self._viewed = kept.value(tensors), NO_VIEWS
                if kept.views or kept.together:
                    self._viewed = Viewed(tensors, kept.views, mb.views_in(value, kept.shape) if kept.together else ())
                versions, taken = [*map(VERSION, tensors)], [*map(VERSION, leaves)]
                numbers = None if intake.tried else [leaf.detach().clone() for leaf in leaves]
                if not quiet:
                    undo.begin(work.step)
                try:
                    handed = self._run(work, kept, value, defer=defer)
                except (Restart, RuntimeError) as error:
                    if quiet:
                        undo.entered()
                    quiet = False
                    own = OWN_CHANGED in str(error) and not kept.together
                    undo.start_again(error, self._place[0], guarded=intake.guarded and not own)
                    kept.together, intake.together = kept.together or own, intake.together or own
                    if versions != [*map(VERSION, tensors)]:
                        intake.learn(True, seen=copies or not cast)
                    intake.put_back(leaves, taken, numbers)
                    intake.guarded |= not isinstance(error, Restart)
                else:
                    break
            if not quiet:
                kept.buffers = undo.end(drew_anew=calls.drew_anew)
            was_changed = versions != [*map(VERSION, tensors)]
            if was_changed or not intake.tried:
                intake.learn(was_changed, seen=copies or not cast)
            if was_changed and self._viewed is not NO_VIEWS:
                kept.changed = self._viewed.changed(kept.edges, self._place[0])
            self._viewed = NO_VIEWS
        if not work.replaying and (not quiet or attributes.begun or attributes.changed):
            undo.note(kept, self._kept.values(), attributes.begun, attributes.changed)
        return handed

    def _run(self, work: Work, kept: Kept, value: Any, *, defer: bool) -> Any:
        calls, mode = self._calls, self._calls.mode
        mode.leaves = set(map(id, kept.leaves))
        mode.at = work.microbatch, work.place, work.replaying, self._kept
        value, aux, stored = value if type(value) is WithAux else (value, None, ())
        if stored:
            calls.stored.set_elsewhere(stored)
        defer = defer and work.defer
        if work.step != self._step:
            self._step, self._cast_anew = work.step, self._ties
            self._walked.clear()
            self._deferring.clear()
        elif self._ties != self._cast_anew:
            self._cast_anew = tuple(each for each in self._ties if each in self._cast_anew or self._may_cast_anew(each))
        mode.waiting, mode.own = self._deferring, self._own
        if self._cast_anew and casts_are_kept():
            for each in self._cast_anew:
                mode.casts_anew(each.parameter)
        added = calls.begin(work.records if defer else None, work.step, work.place, again=self.remakes)
        try:
            start = nodes_made()
            for index in self._layers:
                value = calls.layer(index, value)
            if self._with_loss:
                loss = calls.loss(value, work)
                handed = kept.end(work, value, loss, added.to(aux) if added else aux)
            else:
                aux = added.to(aux) if added else aux
                if calls.stored.tells:
                    stored = (*stored, *calls.stored.told(self._attributes))
                handed = self._hand_on(kept, WithAux(value, aux, stored) if stored or aux is not None else value)
            calls.look_back()
            kept.graph = graph = defer, nodes_made() - start
        finally:
            calls.end()
        if mode.switched:
            check_switched(mode, [each.parameter for each in self._ties])
        # Code that is not torch's own may end elsewhere with as many nodes as before.
        may_differ = calls.is_open and (defer not in self._walked or mode.met_strangers or calls.ran_unseen)
        if may_differ or graph not in self._graphs:
            self._look(kept)
            self._walked.add(defer)
            kept.looked_at = True
            self._graphs.add(graph)
        if defer:  # this run's own, so it need not be copied
            if mode.second_use:
                left = {id(tie.parameter) for tie in self._ties if not tie.may_wait(self._place)} | self._sole
                divert(kept.edges, {*mode.deferred, *self._deferring} - left, work.records, mode.own_casts.values())
            if self._sole:
                work.records.sole = {**work.records.sole, **dict.fromkeys(self._sole, calls.waited)}
            work.deferred = {**work.deferred, **mode.deferred} if work.deferred else mode.deferred
            self._deferring.update(mode.deferred, self._sole)
        kept.known_ties = self._cast_anew
        if self._cast_anew and casts_are_kept():
            kept.casts = {
                each: mode.own_casts[each.parameter] for each in self._ties if each.parameter in mode.own_casts
            }
            for each in self._cast_anew:
                used = each in kept.casts or mode.deferred.get(id(each.parameter), (None, False))[1]
                each.casts(self._place, work.microbatch, used)
        return handed

    def _hand_on(self, kept: Kept, value: Any) -> Any:
        if type(value) is Tensor and value.grad_fn is not None and not value._is_view() and self._viewed is NO_VIEWS:
            kept.edges = [edge_of(value)]
            return value.detach().requires_grad_()
        start = nodes_made()
        tensors, shape = mb.flatten(value, views=self._shares)
        return mb.unflatten(kept.hand_on(tensors, mb.views_in(value, shape), self._viewed, start), shape)
