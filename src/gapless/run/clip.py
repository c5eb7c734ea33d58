"""Gradients as a whole: their norm, with the bits of torch's own function on a model in one piece, however it was cut.

That takes the norm of each gradient, in its dtype, and then the norm of these: first those of one dtype, then those of
the next, in an order of torch's own. (Here a norm has the dtype of its gradient where that is complex, too.)
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from gapless.errors import GaplessError
from gapless.guards.between_ranks import NORM_OF_A_PART, OPTIMIZER_OF_A_PART

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, which are scaled to `max_norm`."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    return _scale(grads, [norm.to(grads[0].device) for norm in norms_of(grads, norm_type)], max_norm, norm_type)


def _of_a_rank() -> GaplessError:
    return NORM_OF_A_PART.refusal("torch's clip_grad_norm_ sees only the gradients of this rank's stages")


class OwnPart:
    """Parameters whose norm torch's own clip_grad_norm_ would get wrong, as long as somebody holds this: of a rank, as
    it would see only these, or of steps that are under way.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], refusal: Callable[[], GaplessError] = _of_a_rank) -> None:
        self._parameters, self.refusal = [weakref.ref(each) for each in parameters], refusal
        self.clears_gradients = refusal is not _of_a_rank  # a step that has ended leaves none
        if _clipping._get_total_norm is not _norm_of_all:
            _clipping._get_total_norm = _norm_of_all
            register_optimizer_step_pre_hook(refuse_lbfgs)
        _parts.add(self)

    def has(self, grads: set[int]) -> bool:
        """Whether one of these, by id, is a gradient of its own."""
        return any(each is not None and id(each.grad) in grads for each in (ref() for ref in self._parameters))

    def is_stepped(self, optimizer: Optimizer) -> bool:
        """Whether these, of a rank, are among its parameters."""
        given = {id(each) for group in optimizer.param_groups for each in group["params"]}
        return not self.clears_gradients and any(id(ref()) in given for ref in self._parameters)


_clipping: Any = torch.nn.utils.clip_grad
_total_norm = _clipping._get_total_norm
_parts: weakref.WeakSet[OwnPart] = weakref.WeakSet()


def _norm_of_all(tensors: Any, *args: Any, **kwargs: Any) -> Any:
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    given = {id(each) for each in tensors}
    for part in [part for part in _parts if part.has(given)]:
        raise part.refusal()
    for part in [part for part in _parts if part.clears_gradients and not tensors]:
        warnings.warn(f"clip_grad_norm_ finds no gradient: {part.refusal()}", stacklevel=4)
    return _total_norm(tensors, *args, **kwargs)


def refuse_lbfgs(optimizer: Optimizer, *_: Any) -> None:
    """Before a step of any optimizer."""
    if isinstance(optimizer, torch.optim.LBFGS) and any(part.is_stepped(optimizer) for part in _parts):
        raise OPTIMIZER_OF_A_PART.refusal(
            "LBFGS steps all parameters together, and this rank has only those of its stages"
        )


def clip_everywhere(
    parameters: Sequence[nn.Parameter],
    mine: set[nn.Parameter],
    counted: set[nn.Parameter],
    group: Any,
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """The same for a model in parts: `parameters` are all of them, `mine` those that are here, and the norms of those
    `counted` nobody else adds.
    """
    here = {each: grad for each in counted if (grad := each.grad) is not None}
    numbers = {each: number for number, each in enumerate(parameters)}
    norms = norms_of(list(here.values()), norm_type)
    found = as_rows(dict(zip((numbers[each] for each in here), norms, strict=True)), len(parameters))
    if group is not None:
        group.allreduce([found]).wait()
    grads = [parameter.grad for parameter in parameters if parameter in mine and parameter.grad is not None]
    norms = from_rows(found, grads[0].device if grads else torch.device("cpu"))
    return _scale(grads, norms, max_norm, norm_type) if norms else torch.tensor(0.0)


def as_rows(norms: Mapping[int, Tensor], count: int) -> Tensor:
    """Norms by the number of their parameter, of so many, as ranks add them: each norm, and its dtype."""
    found = torch.zeros(2, count, dtype=torch.float64)
    values = torch.stack([norm.real.double() for norm in norms.values()]).tolist() if norms else []  # in one copy
    for (number, norm), value in zip(norms.items(), values, strict=True):
        found[:, number] = torch.tensor([value, 1 + _DTYPES.index(norm.dtype)], dtype=torch.float64)
    return found


def from_rows(found: Tensor, device: torch.device) -> list[Tensor]:
    """The norms of all parameters that have one, in their order."""
    there = [(norm, _DTYPES[int(dtype) - 1]) for norm, dtype in found.t().tolist() if dtype]
    return [torch.tensor(norm, dtype=dtype, device=device) for norm, dtype in there]


def norms_of(grads: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """By the kernels that torch's own function takes; of a sharded one, the whole."""
    found = {number: unsharded(torch.linalg.vector_norm(each, norm_type)) for number, each in _sharded(grads)}
    plain = [number for number in range(len(grads)) if number not in found]
    for [each], places in grouped([grads[number] for number in plain]):
        norms = torch._foreach_norm(each, norm_type)
        found |= {plain[place]: norm for place, norm in zip(places, norms, strict=True)}
    return [found[number].to(grad.dtype) for number, grad in enumerate(grads)]


def _sharded(grads: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    return [(number, grad) for number, grad in enumerate(grads) if hasattr(grad, "full_tensor")]


def grouped(tensors: list[Tensor]) -> Any:
    """Those of one device and dtype after another, in torch's order of these, and where they were."""
    return _group_tensors_by_device_and_dtype([tensors], with_indices=True).values() if tensors else ()  # type: ignore[list-item]


def _scale(grads: Sequence[Tensor], norms: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    total = total_of(norms, norm_type)
    scale(grads, factor_of(total, max_norm))
    return total


def total_of(norms: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients, from those of each."""
    ordered = [norm.real for [group], _ in grouped(norms) for norm in group]
    total: Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return total


def factor_of(total: Tensor, max_norm: float) -> Tensor:
    """By which gradients with this norm are multiplied."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients."""
    for grad in grads:
        local(grad).mul_(factor.to(grad.device))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def unsharded(value: Tensor) -> Tensor:
    """All of a DTensor."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole
