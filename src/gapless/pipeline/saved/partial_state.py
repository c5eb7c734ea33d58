"""The state of a model of which other ranks train a part: its numbers here are those from before training."""

import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn

from gapless.guards.between_ranks import PARTIAL_STATE


class PartialState:
    """Of a model that is whole on every rank: `model.state_dict()` refuses, until what other ranks train is loaded. So
    does that of a deep copy; and with such numbers it is not pickled.
    """

    def __init__(self, model: nn.Module, holds: Callable[[Tensor], bool]) -> None:
        foreign = ((name, each) for name, each in model.named_parameters() if not holds(each) and not each.is_meta)
        self._versions = {name: each._version for name, each in foreign}
        self._model = weakref.ref(model)
        self.end: Callable[[], None] = lambda: None
        if self._versions:
            self.end = model._register_state_dict_hook(self._check).remove

    def _stale(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: each for name, each in model.named_parameters() if self._versions.get(name) == each._version}

    def _check(self, model: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """With keep_vars=True parameters themselves are asked for, not their numbers."""
        places = {each.data_ptr() for each in self._stale(model).values()}
        tensors = [each for each in state.values() if type(each) is Tensor and not each.is_meta]
        if stale := sum(each.data_ptr() in places for each in tensors):
            raise PARTIAL_STATE.refusal(f"other ranks train {stale} of the {len(state)} tensors in this state_dict()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made, model = type(self)(nn.Module(), bool), self._model()
        if model is not None:
            made._versions = dict.fromkeys(self._stale(model), 0)  # a copy begins to count anew
            made._model = weakref.ref(memo.get(id(model), model))
        return made

    def __reduce__(self) -> Any:
        model = self._model()
        if model is not None and (stale := self._stale(model)):
            raise PARTIAL_STATE.refusal(
                f"other ranks train {len(stale)} of the parameters of this {type(model).__name__}"
            )
        return type(self), (nn.Module(), bool)
