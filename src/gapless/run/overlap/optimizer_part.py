"""The parameters of one stage in an optimizer: they are stepped by themselves, and can be put back.

All parts have the optimizer's one `state`, and each has groups of its own: what stands in `param_groups` when a step is
handed over holds for its update, whatever a user or a scheduler sets meanwhile.
"""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gapless.errors import ConfigError, note_place
from gapless.run.clip import grouped, norms_of, scale
from gapless.run.overlap.verdict import Verdict

Groups = Sequence[Mapping[str, Any]]


class Setting(NamedTuple):
    """What holds for one update."""

    groups: Groups
    scale: float | None  # of all gradients


def groups_now(optimizer: Optimizer) -> Groups:
    """As they are, for an update to come."""
    return [
        {**_copied_all({key: group[key] for key in group if key != "params"}), "params": group["params"]}
        for group in optimizer.param_groups
    ]


class OptimizerPart:
    """Some parameters of an optimizer. `counted`: those whose norms no other part counts, by their numbers in the
    model.
    """

    def __init__(self, optimizer: Optimizer, parameters: set[Parameter], counted: Mapping[int, Parameter]) -> None:
        self._optimizer, self._counted = optimizer, counted
        self._mine = parameters
        self._given: Groups = ()
        self.groups: list[dict[str, Any]] = []
        self.grads: dict[Parameter, Tensor] = {}  # of this update; what comes next into `.grad` is the next one's
        self._before: list[tuple[Parameter, Tensor, dict[Any, Any] | None]] = []
        self._stepped = False

    def has(self, parameter: Parameter) -> bool:
        """Whether it is one of these."""
        return parameter in self._mine

    def begin(self, groups: Groups) -> None:
        """An update comes, with the gradients that are there."""
        self.forget()
        self.grads = {each: each.grad for each in self._mine if each.grad is not None}
        self.drop_gradients()
        self._given = groups
        self._cut_groups()

    def _cut_groups(self) -> None:
        self.groups = [
            {**group, "params": [each for each in group["params"] if each in self._mine]} for group in self._given
        ]

    def unscale(self, scale: float) -> bool:
        """As a GradScaler does; whether some are not finite."""
        inverse, found = torch.tensor(scale).double().reciprocal().float(), list[Tensor]()
        for [grads], _ in grouped([*self.grads.values()]):
            found.append(torch.zeros((), device=grads[0].device))
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found[-1], inverse.to(grads[0].device))
        return any(each.item() for each in found)

    def norms(self) -> dict[int, Tensor]:
        """Of the gradients, by the number of the parameter."""
        grads = {number: self.grads[each] for number, each in self._counted.items() if each in self.grads}
        return dict(zip(grads, norms_of(list(grads.values()), 2.0), strict=True))

    def step(self) -> None:
        """The optimizer's own, of these parameters alone. What it changes is copied first."""
        state = self._optimizer.state
        own = [each for group in self.groups for each in group["params"]]
        self._before = [
            (each, each.detach().clone(), _copied_all(state[each]) if each in state else None) for each in own
        ]
        self._stepped = True
        made = object.__new__(type(self._optimizer))
        hooks = {f"_optimizer_step_{when}_hooks": OrderedDict[int, Any]() for when in ("pre", "post")}
        made.__dict__ = {**vars(self._optimizer), **hooks, "param_groups": self.groups}
        made.__dict__.pop("step", None)  # a scheduler has put it there, for the optimizer itself
        for each, grad in self.grads.items():
            each.grad = grad
        try:
            made.step()
        except Exception as error:
            note_place(error, "in the optimizer's step")
            raise
        self.drop_gradients()

    def settle(self, verdict: Verdict) -> None:
        """Carries it out."""
        if not verdict.stands:
            self.undo()
        if verdict.factor is not None:
            scale([*self.grads.values()], verdict.factor)
        if not verdict.skips and not self._stepped:
            self.step()

    def undo(self) -> None:
        """As before the last step, if there was one."""
        with torch.no_grad():
            for parameter, value, state in self._before:
                parameter.copy_(value)
                self._optimizer.state.pop(parameter, None)
                if state is not None:
                    self._optimizer.state[parameter] = state
        self._cut_groups()
        self.forget()

    def forget(self) -> None:
        """The last step can't be undone any more."""
        self._before, self._stepped = [], False

    def copies(self) -> dict[Parameter, int]:
        """Bytes that are kept of each, to undo the last step."""
        tensors = {each: (value, *(state or {}).values()) for each, value, state in self._before}
        return {each: sum(getattr(part, "nbytes", 0) for part in kept) for each, kept in tensors.items()}

    def drop_gradients(self) -> None:
        """Those in `.grad`."""
        for each in self._mine:
            each.grad = None


def check_parts(optimizer: Optimizer, parts: Sequence[OptimizerPart], groups: Groups, instead: str) -> None:
    """Raises if a step by parts, which was just made, is another than that of the whole. One part alone, that of a
    rank, is stepped again by halves.
    """
    parameters = [each for group in groups for each in group["params"] if any(part.has(each) for part in parts)]
    before = [(each, each.detach().clone(), _copied_all(optimizer.state.get(each, {}))) for each in parameters]
    grads = {each: grad for part in parts for each, grad in part.grads.items()}
    for part in parts:
        part.undo()
    again = []
    for chosen in filter(None, [parameters] if len(parts) > 1 else [parameters[::2], parameters[1::2]]):
        again.append(OptimizerPart(optimizer, {*chosen}, {}))
        again[-1].begin(groups)
        again[-1].grads = {each: grads[each] for each in chosen if each in grads}
        again[-1].step()
    for each, value, state in before:
        now = optimizer.state.get(each, {})
        if not _same(each, value) or now.keys() != state.keys() or not all(_same(now[key], state[key]) for key in now):
            for part in again:
                part.undo()
            raise ConfigError(
                f"{type(optimizer).__name__} steps a parameter differently if it does not have all of them, but each "
                f"device steps only its own: {instead}"
            )


def merge_groups(optimizer: Optimizer, parts: Sequence[OptimizerPart], before: Groups) -> None:
    """What steps have written into their groups, such as a counter, goes into the optimizer's."""
    for number, (group, given) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        for key in {key for part in parts for key in part.groups[number]} - {"params"}:
            found = [part.groups[number].get(key) for part in parts]
            changed = [each for each in found if not _same(each, given.get(key))]
            if changed and not all(_same(each, found[0]) for each in found):
                raise ConfigError(
                    f"{type(optimizer).__name__} computes {key!r} of a parameter group from all parameters together, "
                    "but each stage steps its own: use pipe.step and optimizer.step()"
                )
            if changed:
                group[key] = found[0]


def _same(one: Any, other: Any) -> bool:
    return bool(one is other or (torch.equal(one, other) if isinstance(one, Tensor) else one == other))


def _copied_all(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: _copied(value) for key, value in values.items()}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
