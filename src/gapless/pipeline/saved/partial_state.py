"""The state of a model of which other ranks train a part: its numbers here are those from before training."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gapless.guards.between_ranks import PARTIAL_STATE


class PartialState:
    """Of a model that is whole on every rank: `model.state_dict()` refuses, until what other ranks train is loaded."""

    def __init__(self, model: nn.Module, holds: Callable[[Tensor], bool]) -> None:
        foreign = (each for each in model.parameters() if not holds(each) and not each.is_meta)
        self._versions = {each.data_ptr(): each._version for each in foreign}
        self.end: Callable[[], None] = lambda: None
        if self._versions:
            self.end = model._register_state_dict_hook(self._check).remove

    def _check(self, model: nn.Module, state: dict[str, Any], *_: Any) -> None:
        """With keep_vars=True parameters themselves are asked for, not their numbers."""
        tensors = [each for each in state.values() if type(each) is Tensor and not each.is_meta]
        stale = sum(self._versions.get(each.data_ptr()) == each._version for each in tensors)
        if stale:
            raise PARTIAL_STATE.refusal(f"other ranks train {stale} of the {len(state)} tensors in this state_dict()")
