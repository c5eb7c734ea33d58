"""The weights of a stage as they were at several updates: what a forward has used, its backward finds again.

    version 0  --update 0-->  version 1  --update 1-->  version 2        the user's parameters are the newest
       |                         |
    leaves that forwards use, each with a gradient of its own

Every version has leaves of its own, which take the place of the parameters in the modules while a forward runs. Those
of the newest share the memory of the user's parameters. An update leaves that memory to whoever still uses it and gives
the parameters a new one; where nobody does, it changes them where they are. What an update does not change is shared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from gapless.guards.between_ranks import STREAM_WEIGHTS
from gapless.guards.weights_and_gradients import FORWARD_WEIGHTS, GRADIENT_HOOKS
from gapless.stage.compiled import is_traced

Leaves = list[nn.Parameter]
_SYNCHRONOUS = "use a schedule that is synchronous"


class Versions:
    """Of the parameters of some layers, which have `names`; `own` is told of every new leaf and of the parameter that
    it stands for.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        own: Callable[[dict[nn.Parameter, nn.Parameter]], None],
        names: Mapping[nn.Parameter, str],
    ) -> None:
        found = places_of(layers)
        self._layers = [layer for layer in layers if isinstance(layer, nn.Module)]
        self.parameters, self._places, self._own = list(found), list(found.values()), own
        self.names = [names[each] for each in found]
        for parameter in self.parameters:
            _check(parameter)
            if parameter.grad is not None:
                raise STREAM_WEIGHTS.refusal(
                    "a parameter has a gradient from before the stream", "drop it with zero_grad()"
                )
        self._free: list[list[nn.Parameter]] = [[] for _ in self.parameters]  # leaves without data, to be used again
        self.newest = 0
        self._installed = -1  # the user's own
        self._updated = False  # since they were as `_left` says
        self._left = [self._mark(parameter) for parameter in self.parameters]
        self._shares = [True] * len(self.parameters)  # whether the newest leaf has the memory of the parameter
        self._known: dict[int, Leaves] = {0: [self._leaf(place, each.data) for place, each in enumerate(found)]}

    def _leaf(self, place: int, data: Tensor) -> nn.Parameter:
        """Of the user's parameter in this place, with these data."""
        if self._free[place]:
            leaf = self._free[place].pop()
            leaf.data = data
        else:
            leaf = nn.Parameter(data.data, requires_grad=self.parameters[place].requires_grad)  # unchanged: version 0
            if getattr(self.parameters[place], "grad_dtype", leaf.dtype) != leaf.dtype:
                leaf.grad_dtype = self.parameters[place].grad_dtype
            self._own({leaf: self.parameters[place]})
        return leaf

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._known))

    def use(self, version: int) -> None:
        """Layers that are called next use this one."""
        if version != self._installed:
            self._install(self._known[version])
            self._installed = version

    def put_back(self) -> None:
        """The layers have the user's parameters, which are the newest version."""
        self._install(self.parameters)
        self._installed = -1
        self._left = [self._mark(parameter) for parameter in self.parameters]

    def check(self) -> None:
        """Raises if the parameters are not as they were put back: versions that are kept would be of another model."""
        for parameter, left in zip(self.parameters, self._left, strict=True):
            _check(parameter)
            if self._mark(parameter) != left:
                raise STREAM_WEIGHTS.refusal(
                    "weights were changed or loaded since the stream was drained, or another stream has trained them, "
                    "but it still has older versions of them"
                )
        found = places_of(self._layers)
        if set(found) != set(self.parameters):
            raise STREAM_WEIGHTS.refusal(
                "a batch of a new kind uses other parameters than those before it, of which a stage has no versions"
            )
        self._places = [found[each] for each in self.parameters]
        for leaves in (*self._known.values(), *zip_longest(*self._free)):
            self._own({leaf: self.parameters[place] for place, leaf in enumerate(leaves) if leaf is not None})

    @property
    def untouched(self) -> bool:
        """The parameters are as they were put back."""
        return self._left == [self._mark(parameter) for parameter in self.parameters]

    @property
    def num_bytes(self) -> int:
        """Of all versions together, what they share counted once."""
        tensors = [*self.parameters, *(leaf for leaves in self._known.values() for leaf in leaves)]
        return sum({each.data_ptr(): each.numel() * each.element_size() for each in tensors}.values())

    def kept(self) -> dict[int, dict[int, Tensor]]:
        """What is not the parameters' own: of each version, by the place of the parameter, what differs from the
        version after it. Of the newest that is what was predicted.
        """
        found: dict[int, dict[int, Tensor]] = {}
        newest = self._known[self.newest]
        after = [leaf if self._shares[place] else self.parameters[place] for place, leaf in enumerate(newest)]
        for version in sorted(self._known, reverse=True):
            leaves = self._known[version]
            found[version] = {place: leaf.detach() for place, leaf in enumerate(leaves) if leaf is not after[place]}
            after = leaves
        return found

    def restore(self, newest: int, kept: Mapping[int, Mapping[int, Tensor]]) -> None:
        """The parameters are version `newest` from now on, and older ones are as `kept` has said."""
        for version in self:
            self._let_go(version)
        self.newest = newest
        self._shares = [place not in kept.get(newest, {}) for place in range(len(self.parameters))]
        after: Leaves = []
        for version in sorted({newest, *kept}, reverse=True):
            data = kept.get(version, {})
            after = [
                self._leaf(place, torch.empty_like(parameter).copy_(data[place]).detach())
                if place in data
                else after[place]
                if after
                else self._leaf(place, parameter.data)
                for place, parameter in enumerate(self.parameters)
            ]
            self._known[version] = after
        self.put_back()
        self._updated = False

    def _mark(self, parameter: nn.Parameter) -> tuple[Any, ...]:
        return parameter._version, parameter.data_ptr(), parameter.requires_grad, _sums(parameter)

    def _install(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter, places in zip(parameters, self._places, strict=True):
            for module, name in places:
                module._parameters[name] = parameter

    def check_forwards(self, version: int) -> None:
        """Raises if forwards that used this one have changed weights where they are: the other versions would not have
        the change, or have it too early. What leaves no trace but in the numbers is looked for before the first update.
        """
        changed = [name for name, leaf in zip(self.names, self._known[version], strict=True) if leaf._version]
        if not changed and not self._updated:
            changed = [
                name
                for name, parameter, left in zip(self.names, self.parameters, self._left, strict=True)
                if self._mark(parameter) != left
            ]
        if changed:
            raise FORWARD_WEIGHTS.refusal(
                f"a forward has changed the weight {changed[0]}, as nn.Embedding does with max_norm, but a stream has "
                "several versions of it, which would differ",
                f"do without, or {_SYNCHRONOUS}",
            )

    def grads(self, version: int) -> list[Tensor | None]:
        """What backwards have added to this one since they were taken last."""
        leaves = self._known[version]
        found = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return found

    def update(
        self,
        grads: Sequence[Tensor | None],
        step: Callable[[], object],
        *,
        keep: bool,
        predict: Callable[[], Mapping[Tensor, Tensor]] = dict,
    ) -> None:
        """Makes the next version: `step` changes the parameters that have a gradient. `keep`: somebody uses the newest
        so far, or will. Of the next, forwards use what `predict` has instead of the parameters, where it has something.
        """
        before, self._updated = self._known[self.newest], True
        moves = [grad is not None and keep and self._shares[place] for place, grad in enumerate(grads)]
        for parameter, grad, moved in zip(self.parameters, grads, moves, strict=True):
            parameter.grad = grad
            if moved:
                with torch.no_grad():
                    parameter.data = parameter.data.clone()
        try:
            step()
        except BaseException:  # as it was: the same values, in the memory that they were in
            for parameter, leaf, moved in zip(self.parameters, before, moves, strict=True):
                parameter.grad = None
                if moved:
                    parameter.data = leaf.data
            raise
        predicted, after = predict(), list(before)
        for place, parameter in enumerate(self.parameters):
            parameter.grad = None
            ahead = predicted.get(parameter)
            elsewhere = self._shares[place] and parameter.data_ptr() != before[place].data_ptr()
            if ahead is not None or moves[place] or elsewhere or not self._shares[place]:
                after[place] = self._leaf(place, parameter.data if ahead is None else ahead)
            self._shares[place] = ahead is None
        self.newest += 1
        self._known[self.newest] = after
        if not keep:
            self._let_go(self.newest - 1)
        self._installed = -2  # the modules may have leaves that are gone

    def forget(self, below: int) -> None:
        """Nobody will ask for versions below this one any more."""
        for version in [version for version in self._known if version < min(below, self.newest)]:
            self._let_go(version)

    def _let_go(self, version: int) -> None:
        for place, leaf in enumerate(self._known.pop(version)):
            if all(others[place] is not leaf for others in self._known.values()):
                leaf.data = leaf.data.new_empty(0)
                self._free[place].append(leaf)


def places_of(layers: Iterable[Any]) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The parameters of some layers, and where these look them up."""
    found: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for layer in layers:
        if is_traced(layer):
            homes = layer.homes()
        else:
            modules = layer.modules() if isinstance(layer, nn.Module) else ()
            homes = ((module, name) for module in modules for name in module._parameters)
        for module, name in homes:
            parameter = module._parameters[name]
            if parameter is not None and (module, name) not in found.setdefault(parameter, []):
                found[parameter].append((module, name))
    return found


def _sums(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of its bits: changes through `.data` leave no other trace. Whole numbers have the same sum in any order."""
    flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[:whole].view(torch.int64)
    return int(words.sum()), int(words[::2].sum()), int(flat[whole:].sum())


def _check(parameter: nn.Parameter) -> None:
    """Refuses what a version of a parameter would not have."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise GRADIENT_HOOKS.refusal(
            "a parameter has a hook, which would not see the gradients of its versions",
            f"{GRADIENT_HOOKS.way_out}, or {_SYNCHRONOUS}",
        )
    if type(parameter) is not nn.Parameter or parameter.__dict__:
        raise STREAM_WEIGHTS.refusal(
            f"a parameter is a {type(parameter).__name__} or has attributes of its own, which its versions would not "
            "have",
            f"use a plain nn.Parameter, or {_SYNCHRONOUS}",
        )
