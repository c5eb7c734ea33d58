"""How the layers of a cell get its inputs: as they are, or as copies where a layer changes them in place."""

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from gapless.guards.passed_tensors import CHANGED_INPUTS

VERSION = attrgetter("_version")  # how often a tensor was changed in place


class Intake:
    """What runs have told of how the layers treat their inputs."""

    def __init__(self) -> None:
        # True once a layer was seen to change the cell's input in place, which torch forbids on a leaf.
        self.guarded = False
        self.tried = False  # a run has told
        self.together = False  # a layer was seen to change one of several that share memory
        self.casts = False  # a layer was seen to cast the input in an autocast of its own

    @property
    def copies(self) -> bool:
        """Whether layers must not get the inputs themselves: one changes them, or nobody knows yet."""
        return self.guarded or not self.tried

    def given(self, leaves: Sequence[Tensor], views: Collection[int], *, cast: bool) -> list[Tensor]:
        """The leaves as the layers get them; `views` were views where they were made."""
        return [self._given(leaf, cast=cast, is_view=number in views) for number, leaf in enumerate(leaves)]

    def _given(self, leaf: Tensor, *, cast: bool, is_view: bool) -> Tensor:
        """As it is, or as the result of an operation, which it is in the plain loop.

        torch forbids to change a leaf in place, so a layer that does gets a copy, and the stage before keeps what it
        has saved. Autocast caches the cast of a leaf but not that of a result, so that gradients of several uses
        would be summed in another precision.
        """
        if not leaf.requires_grad or not (self.copies or cast):
            return leaf
        if self.copies:
            return copied_view(leaf) if is_view else copied(leaf)
        result: Tensor = torch.ops.aten._unsafe_view.default(leaf, leaf.shape)
        if result.stride() != leaf.stride():  # of a dimension of size one, by which kernels are chosen too
            result = torch.ops.aten.alias.default(leaf)
        return result

    def put_back(self, leaves: Sequence[Tensor], versions: Sequence[int], numbers: Sequence[Tensor] | None) -> None:
        """A run did not come to its end: what it has changed is as before, when leaves had changed so often and, while
        nobody knew whether a layer changes them, had these numbers.
        """
        for index, leaf in enumerate(leaves):
            if leaf._version == versions[index]:
                continue
            if numbers is None:
                raise CHANGED_INPUTS.refusal(
                    "a layer has changed its input in place, and its forward must start again, since something in it "
                    "was seen for the first time"
                )
            leaf.detach().copy_(numbers[index])

    def learn(self, changed: bool, *, seen: bool) -> None:
        """Learns from a run whether the layers change their input."""
        if changed and not seen:
            raise CHANGED_INPUTS.refusal(
                "under autocast, a layer changed its input in place for the first time, which can't be undone"
            )
        self.tried = True
        self.guarded = self.guarded or changed


def copied_view(leaf: Tensor) -> Tensor:
    """A copy of what was a view where it was made, as a view."""
    view: Tensor = torch.ops.aten.alias.default(copied(leaf))
    return view


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
