"""What Trainer takes for the model: it has the model's parameters, and runs on the pipeline when it is called."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError

Evaluate = Callable[[Sequence[Any]], Sequence[Any]]  # calls of the model, and what it returns for each


class PipelinedModel(nn.Module):
    """Calls that were foreseen ran together; any other runs alone, with the same bits."""

    def __init__(self, model: nn.Module, evaluate: Evaluate) -> None:
        super().__init__()
        self.module = model
        self._evaluate = evaluate
        self._ready: deque[tuple[Any, Any]] = deque()

    def foresee(self, calls: Sequence[Any]) -> None:
        """These calls come next, in this order."""
        self._ready = deque(zip(calls, self._evaluate(calls), strict=True))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the model, in eval mode."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "on a pipeline gradients are computed in training_step alone: override compute_loss instead, or use "
                "transformers.Trainer"
            )
        call = args or kwargs
        if self._ready and _same(self._ready[0][0], call):
            return self._ready.popleft()[1]
        self._ready.clear()
        return self._evaluate([call])[0]

    def _get_name(self) -> str:
        """That of the model, by which Trainer knows whether labels are shifted; PEFT's have another inside."""
        model: Any = self.module
        return str((model.get_base_model() if hasattr(model, "get_base_model") else model)._get_name())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _same(one: Any, other: Any) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, its = pytree.tree_flatten(other)
    return spec == its and all(a is b or _equal(a, b) for a, b in zip(leaves, others, strict=True))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)
