"""Gradients of weights that autocast has cast, in low precision. Torch casts each of them back by itself, at a fraction
of the speed of a GPU's memory; graphs leave them as they are, and then all are cast at once.
"""

from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from gapless.stage.split.deferred import Records, may_be_low
from gapless.stage.split.reached_parameters import Reached

T = TypeVar("T")


class LowGrads(dict[Parameter, Tensor]):
    """What the next backward from some edges leaves of them, if nothing but the cast leads to the weight, and what the
    records do.
    """

    def __init__(self, edges: Iterable[GradientEdge | None], records: Records) -> None:
        super().__init__()
        reached, records.low = Reached(edges), self
        for parameter in reached.parameters:
            node = reached.cast_nodes.get(id(parameter))
            if node is not None and reached.uses[id(parameter)] == 1 and may_be_low(parameter):
                node.register_prehook(partial(self._leave, parameter))

    def _leave(self, parameter: Parameter, grads: tuple[Tensor | None, ...]) -> tuple[None]:
        if grads[0] is not None:
            self[parameter] = grads[0]
        return (None,)

    def joined(self, found: T) -> T:
        """The backward is over, and has found this. Of some weights one use may have waited, and others not: both
        parts are one gradient.
        """
        for parameter in [each for each in self if each.grad is not None]:
            assert parameter.grad is not None
            parameter.grad.add_(self.pop(parameter))
        return found
