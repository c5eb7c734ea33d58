"""The parameters of a cell: its own, those that other places use too, those that it should not know; what its graphs
tell of them.

A cell is told which of its parameters are shared. Of others it learns from its graphs: `_look` walks one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gapless.guards.weights_and_gradients import SECOND_USES
from gapless.stage.autocast import casts_are_kept
from gapless.stage.calls import Calls
from gapless.stage.cell_inputs import Intake
from gapless.stage.saved_activations import Kept, Work
from gapless.stage.split.call_mode import Restart
from gapless.stage.split.compiled_backward import NODE
from gapless.stage.split.deferred import has_hooks
from gapless.stage.split.reached_parameters import Reached

from .tie import Place, Tie, running

Stray = Callable[[Place, Tensor, bool], None]  # and whether it is late for the casts of this step


class CellTies:
    """What a cell knows of the parameters of its layers."""

    def __init__(self, calls: Calls, layers: range, number: int, *, with_loss: bool) -> None:
        self._calls, self._layers, self._with_loss = calls, layers, with_loss
        self._intake = Intake()
        self._place: Place = (0, number)
        self._ties: tuple[Tie, ...] = ()
        self._step = -1
        self._walked: set[bool] = set()  # graphs of this step: of forwards whose gradients wait, and of others
        self._cast_anew: tuple[Tie, ...] = ()  # in this step
        self._deferring: set[int] = set()  # parameters, by id, whose gradients wait for a W in this step
        self._sole: set[int] = set()  # those that one compiled region uses and nobody else, in the graph last walked
        self._own = self._owned()  # parameters, by id
        self._stray: Stray | None = None
        self._graphs: set[tuple[bool, int]] = set()  # of torch's own modules: how many nodes those had that were walked

    def tie(self, stage: int, ties: Sequence[Tie], stray: Stray | None) -> None:
        """Tells the cell which of its parameters other places use too, and whom to tell of those that it should not
        know.
        """
        self._own, self._place = self._owned(), (stage, self._place[1])
        self._ties = tuple(each for each in ties if id(each.parameter) in self._own)
        self._stray, self._graphs, self._step = stray, set(), -1
        for each in self._ties:
            each.settle(*self._place)

    def _owned(self) -> dict[int, Tensor]:
        return {id(each): each for each in self._calls.parameters_of(self._layers, with_loss=self._with_loss)}

    def owns(self, parameter: Tensor) -> bool:
        """Whether it is one of its layers or of its loss."""
        return id(parameter) in self._own

    def has_deferred(self, parameter: Tensor) -> bool:
        """Whether it waits for a W in this step."""
        return id(parameter) in self._deferring

    def refuse_strays(self, refuse: Stray) -> None:
        """Whom to tell of parameters that it should not know, from the next forward on."""
        self._stray, self._graphs = refuse, set()

    def own(self, copies: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """More parameters, each in the place of one that it may have."""
        self._own.update((id(copy), copy) for copy, of in copies.items() if id(of) in self._own)

    def join(self, tie: Tie) -> None:
        """One more that other places use too."""
        self._ties = (*self._ties, tie)
        tie.join(self._place)

    def _backward(self, work: Work, kept: Kept, edges: list[GradientEdge], starts: list[Tensor]) -> None:
        """Gradients of shared parameters go on from what later places have added up."""
        if not self._ties:
            if edges:
                self._calls.backwards.run(work.records, edges, starts)
            return
        edges, starts = [*edges], [*starts]
        if self._ties != kept.known_ties and not kept.bare:
            kept.find_casts([each for each in self._ties if each.is_first(self._place)])
        with ExitStack() as hooks:
            for each in self._ties:
                for edge, grad in kept.seeds(work, each, self._place, self._deferring, hooks):
                    edges.append(edge)
                    starts.append(grad)
            if edges:
                with running.around((self._place, work.microbatch), edges, starts[0].device):
                    self._calls.backwards.run(work.records, edges, starts)
        for each in self._ties:
            each.passed(self._place, work.microbatch)

    def _waiting(self, work: Work) -> list[tuple[Tensor, Tensor | None, int]]:
        """The parameters that get nothing in the first half of a backward, and what they have. A graph of another kind
        than those that were walked may have as many nodes.
        """
        if not work.defer or not self._calls.is_open:  # torch's own modules do the same every time
            return []
        left = {id(each.parameter) for each in self._ties} | self._sole
        found = [(each, each.grad) for key, (each, _) in work.deferred.items() if key not in left]
        return [(each, grad, 0 if grad is None else grad._version) for each, grad in found]

    def _check_waiting(self, waiting: Iterable[tuple[Tensor, Tensor | None, int]]) -> None:
        for each, grad, version in waiting:
            if each.grad is not grad or (grad is not None and grad._version != version):
                raise SECOND_USES.refusal(
                    f"a layer of stage {self._place[0]} uses a weight of shape {tuple(each.shape)}, whose gradient is "
                    "deferred, in a second way that torch's functions do not show, and in some microbatches only"
                )

    def _look(self, kept: Kept) -> None:
        """Walks the graph for parameters that are used in a way that nobody told: one whose gradient waits and arrives
        now too, and one of another place.
        """
        mode, found = self._calls.mode, Reached(kept.edges or ())
        deferred, own = mode.deferred, self._own
        if both := [each for each in found.parameters if id(each) in deferred]:
            mode.leave_to_autograd(both)
        self._sole = self._used_once(found) if mode.defers_now and self._calls.num_compiled else set()
        if not self._deferring.isdisjoint(found.leaves.keys() - self._sole):
            mode.second_use = True
        if self._stray is not None:
            used = [each for each in found.parameters if id(each) not in own]
            used += [each for key, (each, _) in deferred.items() if key not in own]
            for each in used:
                self._stray(self._place, each, bool(self._walked) and casts_are_kept())
                own[id(each)] = each
            late = [tie for tie in self._ties if any(tie.parameter is each for each in used)]
            low = {*found.casts, *(key for key, (_, is_low) in deferred.items() if is_low)} if late else set()
            again = [tie for tie in late if casts_are_kept() and tie.may_cast(low) and self._may_cast_anew(tie)]
            if again or any(id(tie.parameter) in deferred and not tie.may_wait(self._place) for tie in self._ties):
                raise Restart("a weight of another stage is used")
        self._calls.stored.learns(found.others, kept.leaves, self._place)
        if not self._intake.casts and any(id(leaf) in found.casts for leaf in kept.leaves):
            self._intake.casts = True
            raise Restart("a layer casts its input in an autocast of its own")
        if casts_are_kept():
            self._look_at_casts(found)

    def _used_once(self, found: Reached) -> set[int]:
        """Parameters, by id, of whose gradients all of a microbatch comes from one compiled region. Not those with
        hooks: where a region has no gradient for a parameter, autograd calls them all the same.
        """
        leaves = [leaf for node, _, leaf in found.users() if type(node).__name__ == NODE and not has_hooks(leaf)]
        return {id(leaf) for leaf in leaves if found.uses[id(leaf)] == 1} - {id(each.parameter) for each in self._ties}

    def _may_cast_anew(self, tie: Tie) -> bool:
        """Not where gradients of this step wait: they all do, or none does."""
        return not tie.is_first(self._place) or id(tie.parameter) not in self._deferring

    def _look_at_casts(self, found: Reached) -> None:
        """Autocast keeps one cast of a parameter, for all microbatches and threads. Where the order of more than two
        contributions depends on it, every forward must make the cast anew, as it does where other places use it too.
        Two are enough: a penalty in the loss may turn out to be the third.
        """
        often = [parameter for key, parameter in found.casts.items() if found.uses[key] > 1]
        news = [self._calls.mode.casts_anew(parameter, unless_deferred=True) for parameter in often]
        if any(news):
            raise Restart("autocast casts a weight that is used twice")
