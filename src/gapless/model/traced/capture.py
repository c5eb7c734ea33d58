"""Any model that torch.export can trace, as the layers of a pipeline.

The first microbatch is the example, so nothing is traced before there is one; the parameters exist before, so an
optimizer can. The first trace decides where the model is cut; every later one (eval mode, another kind of batch) is cut
so that parameters stay in their stages. With a plan's cuts parameters have their stages from the start.
"""

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError, PartitionError
from gapless.model.layers import check_call, check_parts
from gapless.model.materialise import Home, homes_in, named_tensors
from gapless.model.own_loss import Counting, loss_in, weighed_by
from gapless.slow_work import slow_work
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.loss_counts import Weighed, told
from gapless.stage.batch.minibatch import Minibatch
from gapless.stage.settings import settings

from .crossing import Crossing, choose, follow, homes_of, is_graph_of, names_of
from .graph_cuts import GraphCuts
from .hollow import hollow
from .piece import GraphLayer, Moved, Piece
from .settled import check_remembered, trace_settled
from .trace import Trace
from .trace_cache import Edition, Found

_MOST_EDITIONS = 8  # of a model that is edited on and on
# What torch.export takes as an argument.
_TRACEABLE = (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Captured:
    """A model and its traces, cut into as many layers as there are stages. `layers` and `module` are as in `Layers`."""

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[torch.device],
        cuts: GraphCuts | None = None,
        *,
        movable: bool = True,
        eager: bool = False,
    ) -> None:
        """`devices`: that of each stage. `movable` says that parameters may change their stages when the model is
        edited, `eager` that no CUDA graphs are made of it.
        """
        check_parts(model)
        if cuts is not None:
            _check_same(cuts, model)
        self.module = model
        self._movable, self._eager = movable, eager
        self._devices = list(devices)
        self._origin = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        self.num_traces = 0  # so far
        self._editions: list[Edition] = []
        self._cuts = cuts
        self._homes = {} if cuts is None else cuts.homes
        self.layers = [GraphLayer() for _ in devices]
        self.edition = self._begun()

    def called(self) -> Sequence[Any]:
        """What is called as it is: nothing, since the graph stands for the model."""
        return ()

    def notice(self) -> None:
        """Once in a step: whether the model was edited. If so, other traces are made, or those from
        before an edit that was taken back are used again.
        """
        if self.edition.holds():
            return
        again = [edition for edition in self._editions if edition is not self.edition and edition.holds()]
        self.edition = again[0] if again else self._begun()
        for number, layer in enumerate(self.layers):
            layer.take(self.edition.pieces[number])

    def _begun(self) -> Edition:
        first = not self._editions
        made = Edition(self.module, [layer.pieces if first else [] for layer in self.layers])
        parts = made.parts()  # what was removed from the model is not held on to
        alike = [each for each in self._editions if each.parts() == parts]
        self._editions = [*alike[1 - _MOST_EDITIONS :], made]
        return made

    def settle(self, stages: Iterable[int]) -> None:
        """Brings the parameters and buffers of these stages to their devices; those of other processes stay."""
        for stage in stages:
            self.layers[stage].settle(self._devices[stage])

    def prepare(self, parts: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Microbatches as the first layer takes them: the number of the trace for it, and its tensors."""
        # Torch's own modules look at these, and take other kernels where nothing is to be learnt.
        modes = (settings(), *self.edition.modes())
        return [self._prepared(part, modes) for part in parts]

    def knows(self, parts: Sequence[Any]) -> bool:
        """Whether nothing is to be traced for these."""
        modes = (settings(), *self.edition.modes())
        return all(self._known(modes, *flat_of(part))[1] is not None for part in parts)

    def _known(self, modes: tuple[Any, ...], flat: list[Any], spec: pytree.TreeSpec) -> tuple[list[Found], int | None]:
        """The traces for microbatches of this kind, and the one that holds for this one. A later question makes sense
        only after the same answers to those before.
        """
        known = self.edition.known.setdefault((modes, spec, tuple(_key(leaf) for leaf in flat)), [])
        return known, next((number for number, asked in known if all(each.same(flat) for each in asked)), None)

    def _prepared(self, part: Any, modes: tuple[Any, ...]) -> tuple[Any, ...]:
        flat, spec = flat_of(part)
        known, number = self._known(modes, flat, spec)
        if number is None:
            number, questions = self._find(modes, flat, spec)
            known.append((number, [each for each in questions if each.of_data]))
        return (number, *flat)

    def weighed(self, prepared: Sequence[tuple[Any, ...]], batch: Minibatch, loss_weight: mb.LossWeight) -> Weighed:
        """What prepared microbatches count for the model's own loss; `batch` has them as they were."""
        countings = [self._counting(number) for number, *_ in prepared]
        if not any(each.has_loss for each in countings):
            return Weighed([float(count) for count in batch.sizes])
        if loss_weight is not None:
            return told(loss_weight, batch.parts)
        return weighed_by(countings, [flat for _, *flat in prepared], batch.sizes, batch.parts)

    def _counting(self, number: int) -> Counting:
        countings = self.edition.countings
        if number not in countings:
            countings[number] = Counting(self.edition.traces[number][1], self.module)
        return countings[number]

    def _find(self, modes: tuple[Any, ...], flat: list[Any], spec: pytree.TreeSpec) -> Found:
        traces = self.edition.traces
        for number, (its_modes, trace) in enumerate(traces):
            if its_modes == modes and trace.fits(flat, spec):
                return number, trace.questions
        if not self.num_traces and self._devices[0].type != self._origin.type:
            # Kernels of another kind of device lay out their results in another way, and a trace relies on it.
            self._origin = self._devices[0]
        # A tensor that is given twice, as ids and as labels, is two: another batch may have two.
        flat = [_apart(leaf, self._origin) if isinstance(leaf, Tensor) else leaf for leaf in flat]
        check_call(self.module, *pytree.tree_unflatten(flat, spec), who=type(self.module).__name__)
        with slow_work("tracing the model", self._why_again(modes)), self.edition.tracing(), self._in_one_place():
            if (shared := self.edition.shared(modes, flat, spec, self._origin)) is not None:
                return shared.number, shared.questions
            trace = trace_settled(self.module, flat, spec)
        check_remembered(self.module, (*(each for _, each in traces), trace))
        self._cut(trace)
        self.edition.add(modes, trace)
        self.num_traces += 1
        return len(traces) - 1, trace.questions

    def _why_again(self, modes: tuple[Any, ...]) -> str:
        if not self.num_traces:
            return ""
        if not self.edition.traces:
            return "again, since it was edited"
        if all(its_modes != modes for its_modes, _ in self.edition.traces):
            return "again, since it is in another mode, such as train or eval"
        return "again, for a batch of another kind"

    def unused(self) -> list[Home]:
        """Where parameters and buffers are that no graph uses."""
        used = {*homes_in(self.layers)}
        return [each for each in homes_in([self.module]) if each not in used]

    def never_set(self) -> list[tuple[nn.Module, str]]:
        """Attributes in which the forward of the model stores tensors: where it was traced, it never does."""
        names = {each for _, trace in self.edition.traces for each in trace.stored}
        return [(self.module.get_submodule(path), name) for path, name in sorted(names)]

    def _in_one_place(self) -> AbstractContextManager[None]:
        """What is on several devices, or nowhere yet, can't be traced together as it is."""
        tensors = (*self.module.parameters(), *self.module.buffers())
        if all(tensor.device == self._origin for tensor in tensors):
            return contextlib.nullcontext()
        return hollow(self.module, self._origin)

    def _cut(self, trace: Trace) -> None:
        crossing = Crossing(trace, eager=self._eager)
        cuts = self._places(crossing)
        if not self.edition.traces:
            self.edition.names = names_of(trace, cuts, self.module)
        for name, stages in homes_of(crossing, cuts).items():
            self._homes.setdefault(name, stages)
        moved = [None if target == self._origin else (self._origin, target) for target in self._devices]
        for layer, piece in zip(self.layers, pieces_of(crossing, cuts, self.module, moved), strict=True):
            layer.pieces.append(piece)

    def _places(self, crossing: Crossing) -> list[int]:
        if self._cuts is not None:
            _check_same(self._cuts, self.module, crossing.parameters())
            if is_graph_of(self._cuts, crossing):
                return list(self._cuts.after)
        elif not self.num_traces:
            return choose(crossing, len(self.layers))
        try:
            return follow(crossing, self._homes, len(self.layers))
        except PartitionError:
            if self.edition.traces or not self._movable:
                raise
            self._homes = {}
            return choose(crossing, len(self.layers))


def pieces_of(crossing: Crossing, cuts: Sequence[int], model: nn.Module, moved: Sequence[Moved | None]) -> list[Piece]:
    """The trace in pieces, of which each may be `moved` to another device than that of the trace."""
    bounds = [-1, *cuts, len(crossing.trace.nodes) - 1]
    return [
        Piece(crossing, start, end, model, moved[number], is_last=number == len(cuts))
        for number, (start, end) in enumerate(pairwise(bounds))
    ]


def _check_same(cuts: GraphCuts, model: nn.Module, used: Iterable[str] = ()) -> None:
    """The model has what the plan knows, and a graph of it has `used` no other parameters."""
    known, there = cuts.homes, {name for name, _ in named_tensors(model)}
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = [name for name in known if name not in there]
    others = [name for name in used if name in trained and name not in known]
    if not missing and not others:
        return
    fact = f"lacks {len(missing)} of the parameters and buffers" if missing else f"uses {len(others)} parameters more"
    raise ConfigError(
        f"the plan is for another model: this {type(model).__name__} {fact}, such as {(missing or others)[0]}; make a "
        "plan for it"
    )


def flat_of(part: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of the arguments, and how they are put together."""
    flat, spec = pytree.tree_flatten(mb.call_of(part))
    for leaf in flat:
        if leaf is not None and not isinstance(leaf, _TRACEABLE):
            raise ConfigError(
                f"the batch has a {type(leaf).__name__}, which can't be traced: pass tensors, numbers and strings, or "
                "tuples, lists and dicts of them"
            )
    return flat, spec


def _key(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _apart(leaf: Tensor, device: torch.device) -> Tensor:
    return leaf.to(device).detach().requires_grad_(leaf.requires_grad)


def find_loss(outputs: Any) -> Tensor | None:
    """The loss that a model computes itself; None if there is none."""
    loss = loss_in(outputs, Tensor)
    return None if loss is not None and loss is outputs and loss.dim() else loss


def own_loss(outputs: Any, target: Any = None) -> Tensor:
    """The loss that a model computes itself, which must be there."""
    loss = find_loss(outputs)
    if loss is None:
        raise ConfigError(
            f"the model returned a {type(outputs).__name__} without a loss, and no loss= was given: pass one (for an "
            "element of what it returns, loss=lambda out, y: out[1]), or a batch with labels if the model takes them"
        )
    return loss
