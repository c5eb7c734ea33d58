"""The casts of weights that autocast would keep: those that a forward makes for itself, and those of weights whose
gradients wait.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter


class KeptCasts:
    """Of the parameters of a stage."""

    def __init__(self) -> None:
        super().__init__()
        self._kind = "cpu"  # of device
        self._casts: dict[int, tuple[int, torch.dtype, Tensor]] = {}
        self.cast_anew: set[int] = set()  # parameters of which every forward makes its own cast, by id
        self._unless_deferred: set[int] = set()  # of these, those that may go on waiting if they have waited
        self.own_casts: dict[Tensor, Any] = {}  # their casts' nodes in this forward
        self._own: dict[int, Tensor] = {}

    def casts_anew(self, parameter: Tensor, *, unless_deferred: bool = False) -> bool:
        """Has autocast's cast of a parameter made anew by every forward; whether that is news. `unless_deferred`: not
        where its gradient waits. What is learnt from a forward that defers nothing must not change those that do: some
        of their step have run, and gradients of one step either all wait or none.
        """
        is_news = id(parameter) not in self.cast_anew
        self.cast_anew.add(id(parameter))
        if not unless_deferred:
            self._unless_deferred.discard(id(parameter))
        elif is_news:
            self._unless_deferred.add(id(parameter))
        return is_news

    def _autocast_dtype(self) -> torch.dtype | None:
        """What autocast casts to here, if it is on."""
        return torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None

    def _cast(self, parameter: Parameter, low: torch.dtype) -> Tensor:
        """The parameter as autocast would cast it, kept until it changes or the step ends."""
        if parameter.dtype == low or parameter.dtype == torch.float64 or not parameter.is_floating_point():
            return parameter.detach()
        known = self._casts.get(id(parameter))
        if known is None or known[:2] != (parameter._version, low):
            known = self._casts[id(parameter)] = (parameter._version, low, parameter.detach().to(low))
        return known[2].detach()

    def forget(self) -> None:
        """Lets go of casts."""
        self._casts.clear()
