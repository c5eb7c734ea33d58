"""The parameters and buffers of a stage that other stages have too: it is told of them, and tells its cells."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from gapless.stage.calls import Calls
from gapless.stage.cell import Cell
from gapless.stage.compiled import is_traced
from gapless.stage.guards.changing_buffers import Owned
from gapless.stage.guards.weight_changes import WeightChanges

from .cell_ties import Stray
from .tie import Tie


class StageTies:
    """What a stage knows of others."""

    layers: list[Any]
    remat: str
    _calls: Calls
    _cells: list[Cell]
    _weight_changes: WeightChanges

    def __init__(self) -> None:
        self._number, self._in_pipeline = 0, False
        self._shared: list[Tie] = []
        self._shared_buffers: Mapping[Owned, str] = {}

    @property
    def holds_state(self) -> bool:
        """Whether its layers were seen to change what is no buffer, such as a counter in an attribute."""
        return any(cell.holds_state for cell in self._cells)

    def parameters(self) -> list[nn.Parameter]:
        """Those that its layers and its loss use, each once."""
        return self._calls.parameters_of(range(len(self.layers)), with_loss=True)

    def _read_again(self) -> list[nn.Parameter]:
        """Weights that are used later than in their microbatch's turn. A stage of this process that uses one
        before this stage does watches it, from an earlier moment to a later one.
        """
        others = {each.parameter for each in self._shared if each.is_home and each.stages[0] != self._number}
        used = [each.parameter for each in self._shared] if self.remat == "none" else self.parameters()
        return [each for each in used if each not in others]

    def own_parameters(self) -> list[nn.Parameter]:
        """Those whose gradients this stage adds: not those that an earlier stage uses too."""
        elsewhere = {each.parameter for each in self._shared if each.stages[0] != self._number}
        return [each for each in self.parameters() if each not in elsewhere]

    def tie(self, number: int, ties: Sequence[Tie], stray: Stray | None = None) -> None:
        """Tells the stage its number, which of its parameters other stages use too, and whom to tell when it uses a
        parameter that it should not know.
        """
        self._number, self._shared, self._in_pipeline = number, list(ties), True
        self._weight_changes.of = self.parameters()
        self._calls.mode.exclude([each.parameter for each in ties])
        for cell in self._cells:
            cell.tie(number, ties, stray)

    def join(self, tie: Tie, cell: int | None = None) -> None:
        """A parameter that other places use too, as a run has shown: of this cell, or of those whose layers have it."""
        self._shared.append(tie)
        for number, each in enumerate(self._cells):
            if number == cell or (cell is None and each.owns(tie.parameter)):
                each.join(tie)

    def share_buffers(self, buffers: Mapping[Owned, str]) -> None:
        """Tells the stage which buffers other stages have too, with their names: none of these may change."""
        self._shared_buffers = buffers

    def refuse_strays(self, refuse: Stray) -> None:
        """Parameters of other stages may not be used, and whoever does is told so."""
        for cell in self._cells:
            cell.refuse_strays(refuse)

    def own(self, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Tells the stage of more parameters, each of which takes the place of one that it has."""
        for layer in self.layers:
            if is_traced(layer):
                layer.learn()
        for cell in self._cells:
            cell.own(copies)
        self._calls.mode.stand_in(copies)

    def exclude(self, parameter: nn.Parameter) -> None:
        """Leaves the gradient of a parameter to autograd."""
        self._calls.mode.exclude([parameter])

    def has_deferred(self, parameter: nn.Parameter) -> bool:
        """Whether its gradients wait for a W, those of some microbatches of this step at least."""
        return any(cell.has_deferred(parameter) for cell in self._cells)
