"""Layers as people write them: small, and each with something that a pipeline may get wrong.

All of them take and return a tensor of shape (samples, length, width).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

LENGTH, WIDTH, VOCABULARY = 4, 6, 11


class Do(nn.Module):
    """A layer from a function and the modules and parameters it uses."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        self.modules_used = nn.ModuleList([part for part in parts if isinstance(part, nn.Module)])
        self.parameters_used = nn.ParameterList([part for part in parts if isinstance(part, nn.Parameter)])

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(*self.modules_used, *self.parameters_used, *inputs, **named)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Attention written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = self.joint(x).view(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))  # type: ignore[no-any-return]


class Twice(torch.autograd.Function):
    """x times the mean of w: torch's function modes see nothing of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w.mean(), (grad * x).sum() / w.numel() * torch.ones_like(w)


class Counter(nn.Module):
    """A buffer that its forward changes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x * (1 + self.seen / 64)


class Average(nn.Module):
    """A buffer that its forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean((0, 1))
        return x - self.mean


def swapped(part: nn.Module) -> nn.Module:
    """A layer of images or signals: channels come before places."""
    return Do(lambda part, x: part(x.transpose(1, 2)).transpose(1, 2), part)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 4)


def table() -> nn.Module:
    """Its gradient for one sample is a view of that of its input."""
    made = nn.Parameter(torch.linspace(-1, 1, LENGTH * WIDTH).view(LENGTH, WIDTH))
    return Do(lambda each, x: x + each.unsqueeze(0), made)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def _cast_here(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first: Tensor = part(x) + part(x * 0.5) * torch.tanh(part(x))
    with torch.autocast("cpu", torch.bfloat16):
        second: Tensor = part(x)
        return (first + second).float()


def _uncast_here(part: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        cold: Tensor = part(x.float())
    warm: Tensor = part(x)
    return cold + warm


def _changed(part: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = part(x)
    return y.mul_(0.5).add_(x.mean()).relu_()


def _scaled_by_its_weight(part: nn.Module, x: Tensor) -> Any:
    return Twice.apply(part(x), part.weight)  # type: ignore[no-untyped-call]


def _hooked(part: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = part(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.75)
    return y


def _expert(x: Tensor, up: nn.Parameter, down: nn.Parameter) -> Tensor:
    return torch.einsum("blw,wv->blv", torch.tanh(x @ up), down)


@torch.jit.script
def scripted_dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.2, True)


# Each makes one layer. Those that torch.export takes come first, and the rest below.
TRACEABLE: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "residual": Residual,
    "sequence": lambda: nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh()),
    "attention": Heads,
    "torch's attention": lambda: Do(
        lambda part, x: x + part(x, x, x, need_weights=False)[0], nn.MultiheadAttention(WIDTH, 2, batch_first=True)
    ),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: swapped(nn.GroupNorm(2, WIDTH)),
    "batch norm": lambda: swapped(nn.BatchNorm1d(WIDTH)),
    "conv": lambda: swapped(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "depthwise": lambda: swapped(nn.Conv1d(WIDTH, WIDTH, 3, padding="same", groups=WIDTH, bias=False)),
    "transposed": lambda: swapped(nn.ConvTranspose1d(WIDTH, WIDTH, 1)),
    "image": lambda: Do(lambda part, x: part(x.unsqueeze(1)).mean(1), nn.Conv2d(1, 2, 3, padding=1)),
    "positions": lambda: Do(lambda table, x: x + table(torch.arange(x.shape[1])), nn.Embedding(LENGTH, WIDTH)),
    "scale": lambda: Do(lambda scale, x: x * scale, parameter(WIDTH)),
    "matmul": lambda: Do(lambda w, x: torch.tanh(x @ w), parameter(WIDTH, WIDTH)),
    "addmm": lambda: Do(
        lambda b, w, x: torch.addmm(b, x.reshape(-1, WIDTH), w).view(x.shape), parameter(WIDTH), parameter(WIDTH, WIDTH)
    ),
    "einsum": lambda: Do(lambda up, down, x: _expert(x, up, down), parameter(WIDTH, WIDTH), parameter(WIDTH, WIDTH)),
    "its weight twice": lambda: Do(lambda part, x: part(x) + part(x * 0.5) * 0.25, linear()),
    "its weight in two ways": lambda: Do(lambda part, x: part(x) * part.weight.square().mean(), linear()),
    "halves": lambda: Do(lambda part, x: torch.cat(part(x).chunk(2, -1)[::-1], -1), linear()),
    "detached": lambda: Do(lambda part, x: x - 0.5 * part(x).detach(), linear()),
    "changes its own": lambda: Do(_changed, linear()),
    "prelu": lambda: nn.PReLU(),
    "relu": lambda: nn.ReLU(),
    "dropout": lambda: nn.Dropout(0.25),
}
UNTRACED: dict[str, Callable[[], nn.Module]] = {
    "torch's encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True),
    "recurrent": lambda: Do(lambda part, x: part(x)[0], nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "custom function": lambda: Do(_scaled_by_its_weight, linear()),
    "counter": Counter,
    "average": Average,
    "instance norm": lambda: swapped(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "checkpoint": lambda: Do(
        lambda part, x: checkpoint(part, x, use_reentrant=False), nn.Sequential(linear(), nn.Dropout(0.2))
    ),
    "hook inside": lambda: Do(_hooked, linear()),
    "casts here": lambda: Do(_cast_here, linear()),
    "casts not": lambda: Do(_uncast_here, linear()),
    "noise": lambda: Do(lambda x: x + 0.1 * torch.randn_like(x)),
    "random depth": lambda: Do(lambda part, x: part(x) if torch.rand(()) < 0.5 else x, linear()),
    "functional dropout": lambda: Do(lambda part, x: F.dropout(part(x), 0.2) + F.dropout(x, 0.1), linear()),
    "in place dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.3, inplace=True)),
    "init in forward": lambda: Do(lambda x: x + nn.init.normal_(torch.empty(x.shape[1:]), std=0.1)),
    "own seed": lambda: Do(_seeds_itself, linear()),
    "forked": lambda: Do(_forks, linear()),
    "scripted": lambda: Do(lambda x: scripted_dropout(x)),
}


def _seeds_itself(part: nn.Module, x: Tensor) -> Tensor:
    y = part(x) + torch.rand(WIDTH)
    torch.manual_seed(7)
    return y * torch.rand(WIDTH)  # type: ignore[no-any-return]


def _forks(part: nn.Module, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        noise = torch.rand(WIDTH)
    return part(x) * noise + torch.rand(WIDTH)  # type: ignore[no-any-return]
