"""Whether two ranks have the same numbers, without sending them: of each tensor a weighed sum of some of its elements,
and the sum of their sizes, by which the difference of two is judged.

Numbers that were computed alike on different processors may differ in their last bits, and are the same here. Another
sample in its place, or another seed, changes nearly all of them.
"""

import torch
from torch import Tensor, nn

_ELEMENTS = 1 << 12  # of a tensor, at the most
_SAME = 1e-6  # of the sizes
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
UNKNOWN = (0.0, -1.0)  # what is not here is not compared


def fingerprints(tensors: list[Tensor]) -> Tensor:
    """Two numbers for each, on the CPU. From a GPU all come in one copy."""
    made = [_fingerprint(tensor) for tensor in tensors]
    together = torch.empty(len(made), 2, dtype=torch.float64)
    for device in {each.device for each in made}:
        places = [place for place, each in enumerate(made) if each.device == device]
        together[places] = torch.stack([made[place] for place in places]).cpu()
    return together


def _fingerprint(tensor: Tensor) -> Tensor:
    if type(tensor) not in _PLAIN or tensor.is_meta or tensor.layout is not torch.strided:
        return torch.tensor(UNKNOWN, dtype=torch.float64)
    if tensor.is_quantized or tensor.is_nested:
        return torch.tensor(UNKNOWN, dtype=torch.float64)
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS) | 1  # odd: not always the same column
    some = flat[::step][:_ELEMENTS].to(torch.float64).nan_to_num(0.0, 1.0, -1.0)
    weights = torch.arange(2, 2 + len(some), device=some.device, dtype=torch.float64).sqrt_().frac_().add_(0.5)
    return torch.stack([some @ weights + flat.numel(), some.abs().sum() + flat.numel()])


def differ(one: Tensor, other: Tensor) -> Tensor:
    """For each tensor whether the two ranks have different ones."""
    known = (one[:, 1] >= 0) & (other[:, 1] >= 0)
    return known & ((one - other).abs().amax(1) > _SAME * (one[:, 1] + other[:, 1]))
