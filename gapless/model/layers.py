"""A model as a sequence of layers, with the names its parameters had before anybody cut it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from gapless.errors import PartitionError

Layer = Callable[..., Any]


class Layers:
    """The layers in order, and the module that owns their parameters under their original names."""

    def __init__(self, model: Any, by_hand: Sequence[Layer] | None = None) -> None:
        """`by_hand`: layers that together are the model, which then only names their parameters."""
        if by_hand is not None:
            self.layers: list[Layer] = list(by_hand)
            self.module: nn.Module = model
            _check_owned(self.layers, model)
        elif isinstance(model, nn.Sequential | nn.ModuleList):
            self.module = model
            self.layers = list(model)
        elif isinstance(model, Sequence | Iterable) and not isinstance(model, nn.Module):
            self.layers = list(model)
            self.module = _owner(self.layers)
        else:
            raise PartitionError(
                f"a {type(model).__name__} is not a sequence of layers; pass an nn.Sequential or a list of layers"
            )
        for number, layer in enumerate(self.layers):
            if not callable(layer) or isinstance(layer, nn.ModuleList | nn.ModuleDict):
                raise PartitionError(f"layer {number} is a {type(layer).__name__}, which can't be called")

    def costs(self) -> list[int]:
        """Parameters of each layer, and one for its existence: a stand-in until the layers have been measured."""
        return [
            1 + (sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0)
            for layer in self.layers
        ]


def is_sequence(model: Any) -> bool:
    """Whether it is cut between its layers, and not traced."""
    return not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList)


def _check_owned(layers: Sequence[Layer], model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PartitionError(
            f"layers= cuts a module by hand, but the model is a {type(model).__name__}: pass one of them"
        )
    owned = set(model.parameters())
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            if parameter not in owned:
                raise PartitionError(
                    f"layer {number} has the parameter {name}, which the model does not have: its gradient would never "
                    "reach the optimizer"
                )


def _owner(layers: Sequence[Layer]) -> nn.Module:
    """Names as in an nn.Sequential of the same layers: `3.weight` is of layer 3, also where others are plain
    functions.
    """
    owner = nn.Module()
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            owner.add_module(str(number), layer)
    return owner
