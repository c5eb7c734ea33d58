"""A stage computes: it runs its layers forward and backward for one microbatch after another, on one device.

It knows nothing of schedules and of other stages. What comes in and what goes out are trees of tensors; an outgoing
tensor is cut off from its graph and carries `requires_grad` exactly if a gradient for it must come back:

    inputs           --forward-->   outputs             (trees)
    input gradients  <--backward--  output gradients    (lists: for each tensor of the tree its gradient, or None)

Between forward and backward a stage keeps, for each microbatch, the inputs and the graph, or with remat the inputs
alone; between `backward_input` and `backward_weight` only what the deferred weight gradients need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gapless.errors import GaplessError
from gapless.guards.held_state import FORWARD_ORDER, SHARED_BUFFERS
from gapless.guards.weights_and_gradients import SAVED_TENSORS
from gapless.stage.batch.loss_divisors import Divisors
from gapless.stage.batch.plain import apply_first
from gapless.stage.guards.changing_buffers import LateUses, Owned, changed_late, marks_of, moved
from gapless.stage.guards.stored_tensors import Stored
from gapless.stage.guards.weight_changes import WeightChanges, versions_of
from gapless.stage.norm.running_statistics import BatchNorm
from gapless.stage.offload.offloading import Offloading
from gapless.stage.random.backward_draws import BackwardMode
from gapless.stage.shared.stage_ties import StageTies
from gapless.stage.split.deferred import Records

from .autocast import clear_casts
from .calls import Calls
from .remat import cells_of
from .saved_activations import Work

Then = Callable[[Any], None]
Remat = Literal["none", "stage", "layer"]
_AS_EVER = contextlib.nullcontext()
_CHANGED_SINCE = "modified by an inplace operation"  # what torch says of a saved tensor


class Stage(Offloading, StageTies):
    """A run of consecutive layers on one device.

    `first_layer` is the number of its first layer in the model, `first_microbatch` that of its microbatch 0 among all
    replicas: seeds count from both. `split` says that the two halves of the backward will be called. `loss` belongs to
    the last stage: `loss(outputs, target)` must be a scalar. With `spread` (the first stage) a tuple of inputs is the
    positional arguments of the first layer and a dict its keyword arguments; elsewhere, as in `nn.Sequential`, what a
    layer returns is the one argument of the next. With `batchnorm="deferred"`, `finish` ends a minibatch. `stored` is
    shared by the stages of a model.
    """

    def __init__(
        self,
        layers: Sequence[Callable[..., Any]],
        *,
        first_layer: int,
        seed: int = 0,
        remat: Remat = "none",
        split: bool = False,
        loss: Callable[[Any, Any], Tensor] | None = None,
        spread: bool = False,
        batchnorm: BatchNorm = "microbatch",
        first_microbatch: int = 0,
        stored: Stored | None = None,
    ) -> None:
        super().__init__()
        self.layers = list(layers)
        self.remat = remat
        self.split = split
        self.loss = loss
        self._spread = spread
        self._calls = Calls(
            self.layers,
            first_layer,
            seed=seed,
            split=split,
            loss=loss,
            spread=spread,
            batchnorm=batchnorm,
            first_microbatch=first_microbatch,
            stored=stored,
        )
        weights = self._calls.mode.weights = self._calls.stored.weights
        weights.update(map(id, self.parameters()))
        self._cells = cells_of(self.layers, self._calls, remat=remat, with_loss=loss is not None)
        *self._first_cells, self._last_cell = self._cells
        self._first_cell, *later = self._cells
        self._cells_back = later[::-1]
        self._work: dict[int, Work] = {}
        self.forwards_in_order = True  # else nothing may be kept from one microbatch to the next
        # Around the first backward of each step, and around its other half.
        self._back, self._weights = (
            BackwardMode(self._calls.draws, self._calls.statistics, self._calls.stored.generators) for _ in range(2)
        )
        self._step_back = self._step_weight = -1
        self._step, self._weight_changes = -1, WeightChanges(self.parameters())
        # By how many bytes its actions change what is allocated on a GPU, by their letters; None: it has not run yet.
        self.changes: dict[str, list[int]] | None = None

    def draws_among_others(self) -> None:
        """Whoever is not of ours may draw from torch's default generators during a forward: a loader that goes on."""
        self._calls.watch_always()

    @property
    def live(self) -> int:
        """The number of microbatches of which something is kept: from their forward to the end of their backward."""
        return len(self._work)

    @property
    def calls(self) -> Calls:
        """How its layers are called, and what is known of them."""
        return self._calls

    def forward(
        self,
        microbatch: int,
        inputs: Any,
        *,
        step: int,
        place: int | None = None,
        target: Any = None,
        weight: float | Tensor = 1.0,
        want_outputs: bool = True,
        defer: bool = True,
        keep: bool = False,
        leaves: bool = False,
        then: Then | None = None,
    ) -> Any:
        """Runs the layers. Returns the outputs; the last stage returns (outputs, or None if not wanted, loss without
        its weight). `then` is called with the outputs as soon as they are there: others may wait for them.
        `keep` says that there will be no recompute of this microbatch, `leaves` that `offload` comes next. `place` is
        its number in its step, for seeds, where `microbatch` counts on from step to step.
        """
        if microbatch in self._work:
            raise GaplessError(
                f"microbatch {microbatch} is in flight already: its backward, or drop(), comes before its next forward."
            )
        if step != self._step:
            self._step = step
            self._weight_changes.begin(self._read_again())
        place = microbatch if place is None else place
        work = Work(microbatch, step, place, target, weight, want_outputs, defer, Records(), keep, self._in_pipeline)
        self._work[microbatch] = work
        try:
            with self.saving(work, inputs) if leaves and (keep or self.remat == "none") else _AS_EVER:
                for cell in self._first_cells:
                    inputs = cell.forward(work, inputs)
                return self._last_cell.forward(work, inputs, then)
        except BaseException:
            self._forget(microbatch)
            raise

    def recompute(self, microbatch: int) -> None:
        """Rebuilds the graph of a microbatch from its kept inputs (remat="stage"); the backward does it itself if
        nobody did.
        """
        if self.remat == "stage":
            self._cells[0].recompute(self.there(microbatch))

    def backward(
        self, microbatch: int, output_grads: list[Tensor | None] | None, then: Then | None = None
    ) -> list[Tensor | None]:
        """The whole backward: adds to the parameters' `.grad`, returns the gradients of the inputs, frees the
        microbatch.
        """
        grads = self.backward_input(microbatch, output_grads, then)
        self.backward_weight(microbatch)
        return grads

    def backward_input(
        self, microbatch: int, output_grads: list[Tensor | None] | None, then: Then | None = None
    ) -> list[Tensor | None]:
        """The half of the backward that others wait for; what is not deferred gets its gradient here. Frees the graph.

        `output_grads` has one entry per tensor of the outputs; None (for the list) where the loss starts the backward.
        `then` is called with the gradients as soon as they are there.
        """
        work = self.there(microbatch)
        grads: list[Tensor | None] = output_grads or []
        self._calls.backwards.watching = self._back if work.step != self._step_back else None
        # In a plain loop no forward of a later microbatch comes before a backward.
        # None of torch's own modules changes a buffer that is called barely.
        late = not self._calls.bare.exist and max(self._work) > microbatch
        marks = marks_of(self._own_changing()) if late else None
        before = versions_of(self._weight_changes.hooked) if self._weight_changes.hooked else None
        try:
            if marks:
                with LateUses(self._changing(), self._number):
                    grads = self._through_cells(work, grads, then)
            elif self._cells_back:
                grads = self._through_cells(work, grads, then)
            else:
                grads = self._first_cell.backward(work, grads, then)
        except RuntimeError as error:
            if _CHANGED_SINCE not in str(error):
                raise
            raise SAVED_TENSORS.refusal(
                f"the backward of stage {self._number} for microbatch {work.place} needs a tensor that was changed in "
                "place since its forward, most likely a weight or a buffer that the forward of a later microbatch has "
                "changed"
            ) from error
        self._step_back = work.step
        if before is not None:
            self._weight_changes.changed_in_backward(before, self._number, others=len(self._work) > 1)
        if marks and moved(marks):
            raise changed_late(self._number, "a buffer")
        return grads

    def _through_cells(self, work: Work, grads: list[Tensor | None], then: Then | None) -> list[Tensor | None]:
        for cell in self._cells_back:
            grads = cell.backward(work, grads)
        return self._first_cell.backward(work, grads, then)

    def _changing(self) -> list[Owned]:
        """Buffers that forwards were seen to change; those of batch norms are counted elsewhere."""
        return [each for cell in self._cells for each in cell.changing]

    def _own_changing(self) -> Iterator[Owned]:
        """Those that no other stage changes meanwhile, and counters of batch norms."""
        found = (*self._changing(), *self._calls.statistics.counters)
        return (each for each in found if each not in self._shared_buffers)

    def backward_weight(self, microbatch: int) -> None:
        """The other half: the deferred weight gradients. Frees the microbatch."""
        work = self._work.pop(microbatch)
        before = versions_of(self._weight_changes.hooked) if self._weight_changes.hooked else None
        watched = work.step != self._step_weight and work.records.run_code_of_users
        with self._weights if watched else _AS_EVER:
            work.records.accumulate()
        self._step_weight = work.step
        if before is not None:
            self._weight_changes.changed_in_backward(before, self._number, others=bool(self._work))

    def infer(self, inputs: Any) -> Any:
        """The outputs alone: no gradients, no interception, nothing kept. Train or eval mode is the caller's choice."""
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                inputs = apply_first(layer, inputs) if self._spread and number == 0 else layer(inputs)
        clear_casts()
        return inputs

    def watch_divisors(self) -> None:
        """Microbatches count by their samples, and it is not known whether that is right for the loss."""
        self._calls.divisors = Divisors()

    def sum_later(self) -> None:
        """Tells the stage that its gradients are summed with those of other replicas when the step ends."""
        self._weight_changes.summed_later = True

    def compute_alone(self, alone: bool) -> None:
        """Tells the stage whether no other thread of this process computes."""
        self._calls.mode.one_thread = alone

    def finish(self, *, resting: bool = True) -> None:
        """The minibatch is over: running statistics that were deferred move. `resting`: no other one is under way."""
        self._calls.stored.finish(resting=resting)
        statistics, changing = self._calls.statistics, {*self._changing()}
        for (module, name), shown in self._shared_buffers.items():
            if (module, name) in changing or id(module._buffers[name]) in statistics.moved:
                raise SHARED_BUFFERS.refusal(
                    f"several stages have the buffer {shown} and change it, and they would do so in another order than "
                    "plain training"
                )
        self._weight_changes.finish(self._number, whole=not self._work)
        self._step = self._step if self._work else -1  # the next one may have the same number
        if not self.forwards_in_order and (changing or statistics.moves):
            raise FORWARD_ORDER.refusal(
                f"the schedule runs the forwards of stage {self._number} out of microbatch order, but its layers "
                "change buffers that depend on that order"
            )
        statistics.finish(whole=not self._work)
        if self._calls.divisors is not None:
            self._calls.divisors.finish()

    def rest(self) -> None:
        """Nothing is under way in any stage: what layers have stored in attributes is there for the caller."""
        self._calls.stored.rest()

    def drop(self, *, resting: bool = True) -> None:
        """Forgets every microbatch in flight, and what is cached for one step. `resting`: no other stage computes."""
        self._step = -1
        for microbatch in list(self._work):
            self._forget(microbatch)
        self._calls.forget()
        self._calls.statistics.clear()
        if self._calls.divisors is not None:
            self._calls.divisors.drop()
        if resting:
            self.rest()

    def _forget(self, microbatch: int) -> None:
        self._work.pop(microbatch).records.clear()
        for cell in self._cells:
            cell.drop(microbatch)
