"""What a CUDA graph takes for granted: it does again what was captured, whatever the Python code would do by now."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .settings import settings
from .way import has_hooks

_NUMBERS = (bool, int, float, str, type(None))


class Unchanged:
    """The tensors, the numbers and the settings that the calls of a stage depend on, as they are now."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self._tensors: list[Tensor] = []  # held, so that their ids stay their own
        self._facts = [settings(), *(fact for part in parts for fact in self._of(part))]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unchanged) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]

    def _of(self, part: Any) -> list[Any]:
        if not isinstance(part, nn.Module):
            return [id(part)]
        facts: list[Any] = []
        for module in part.modules():
            values = module.__dict__
            facts.append((id(module), *(each for each in values.values() if type(each) in _NUMBERS)))
            own = (each for each in values.values() if isinstance(each, Tensor))
            for tensor in (*module._parameters.values(), *module._buffers.values(), *own):
                if tensor is not None:
                    self._tensors.append(tensor)
                    version = tensor._version if tensor.is_cpu else None  # its numbers are part of the graph
                    facts.append((id(tensor), tensor.data_ptr(), tensor.requires_grad, version))
        return facts


def why_not(parts: Sequence[Any], parameters: Sequence[nn.Parameter]) -> str | None:
    """What of these layers a graph would leave out, if there is anything."""
    for module in (each for part in parts if isinstance(part, nn.Module) for each in part.modules()):
        name = type(module).__name__
        if has_hooks(module):
            return f"its {name} has hooks, or a forward of its own"
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            return f"its {name} counts what it sees"
    for parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return "a parameter has hooks"
        if type(parameter) is not nn.Parameter:
            return f"a parameter is a {type(parameter).__name__}"
    return None
