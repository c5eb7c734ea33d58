"""AmoebaNet-D (Real et al., 2019), the image classifier of GPipe's experiments: L normal cells, D filters.

    stem - R - R - N x L/3 - R - N x L/3 - R - N x L/3 - pool - classes      N: normal cell, R: reduction cell

A cell sees the output of the last cell and that of the one before: both travel as a pair, so that this is a sequence,
and a pipeline can cut it between any two cells. In a cell, states 0 and 1 are these two. Each further state is the sum
of two earlier ones, each after an operation. The output is some of the states, side by side. A reduction cell halves
height and width and doubles the filters. The cells are those of the authors' own program, whose D puts out other states
than its paper says; they have the published numbers of parameters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # the output of the last cell, and of the one before
Operation = Callable[[int, int], nn.Module]  # from channels and a stride


def _convolved(into: int, out: int, kernel: tuple[int, int] = (1, 1), stride: Any = 1) -> nn.Sequential:
    """ReLU, convolution and batch norm."""
    padding = kernel[0] // 2, kernel[1] // 2
    return nn.Sequential(
        nn.ReLU(), nn.Conv2d(into, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out, eps=1e-3)
    )


def _narrowed(channels: int, *parts: tuple[tuple[int, int], Any]) -> nn.Sequential:
    """Convolutions on a quarter of the channels."""
    few = max(1, channels // 4)
    convolutions = [_convolved(few, few, kernel, stride) for kernel, stride in parts]
    return nn.Sequential(_convolved(channels, few), *convolutions, _convolved(few, channels))


def _none(channels: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else _convolved(channels, channels, stride=stride)


def _1x1(channels: int, stride: int) -> nn.Module:
    return _convolved(channels, channels, stride=stride)


def _3x3(channels: int, stride: int) -> nn.Module:
    return _narrowed(channels, ((3, 3), stride))


def _1x7_7x1(channels: int, stride: int) -> nn.Module:
    return _narrowed(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1)))


def _mean_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def _max_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def _max_2x2(channels: int, stride: int) -> nn.Module:
    assert stride == 2, "only where it halves"
    return nn.MaxPool2d(2, stride, ceil_mode=True)


class Genes(NamedTuple):
    """Of a cell: for each further state the two it is made of and what is done to them; and the states put out."""

    states: tuple[tuple[int, Operation, int, Operation], ...]
    out: tuple[int, ...]


_NORMAL = Genes(
    (
        (1, _1x1, 1, _max_3x3),
        (1, _none, 0, _1x7_7x1),
        (0, _1x1, 0, _1x7_7x1),
        (2, _max_3x3, 2, _none),
        (1, _mean_3x3, 5, _1x1),
    ),
    (0, 3, 4, 6),
)
_REDUCTION = Genes(
    (
        (0, _max_2x2, 0, _max_3x3),
        (2, _none, 1, _3x3),
        (2, _1x7_7x1, 2, _max_3x3),
        (3, _none, 1, _max_2x2),
        (2, _mean_3x3, 3, _1x1),
    ),
    (4, 5, 6),
)


class Halved(nn.Module):
    """Half the height and width: of the pixels of each square one goes to one half of the channels, and the opposite
    one to the other half.
    """

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(into, out // 2, 1, bias=False)
        self.odd = nn.Conv2d(into, out - out // 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(out, eps=1e-3)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(x)
        odd = F.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        return self.norm(torch.cat([self.even(x[:, :, ::2, ::2]), self.odd(odd[:, :, ::2, ::2])], dim=1))


class AmoebaCell(nn.Module):
    """From the outputs of two cells to those of the next two. `before` says how to make the older one fit."""

    def __init__(self, genes: Genes, into: int, into_before: int, channels: int, *, halves: bool, halved: bool) -> None:
        super().__init__()
        self._genes, stride = genes, 2 if halves else 1
        self.now = _convolved(into, channels)
        if halved:
            self.before: nn.Module = Halved(into_before, channels)
        else:
            self.before = nn.Identity() if into_before == channels else _convolved(into_before, channels)
        self.operations = nn.ModuleList(
            operation(channels, stride if state < 2 else 1)
            for first, one, second, other in genes.states
            for state, operation in ((first, one), (second, other))
        )
        self.channels = channels * len(genes.out)

    def forward(self, pair: Pair) -> Any:
        last, before = pair
        states = [self.now(last), self.before(before)]
        operations = iter(self.operations)
        for first, _, second, _ in self._genes.states:
            one, other = next(operations), next(operations)
            states.append(one(states[first]) + other(states[second]))
        return torch.cat([states[number] for number in self._genes.out], dim=1), last


class Stem(nn.Module):
    """From an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels, eps=1e-3)

    def forward(self, image: Tensor) -> Any:
        x = self.norm(self.convolution(image))
        return x, x


class Head(nn.Module):
    """To the scores of the classes."""

    def __init__(self, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(channels, classes)

    def forward(self, pair: Pair) -> Any:
        last, _ = pair
        return self.linear(self.dropout(F.relu(last).mean((2, 3))))


def amoebanet(*, cells: int = 18, filters: int = 208, classes: int = 1000, dropout: float = 0.0) -> nn.Sequential:
    """`cells` normal cells, a multiple of 3, of `filters` filters, a multiple of 4; images of 3 channels in, scores of
    classes out.
    """
    for name, value, factor in (("cells", cells, 3), ("filters", filters, 4)):
        if value < factor or value % factor:
            raise ValueError(f"an AmoebaNet with {name}={value} is not known: choose a multiple of {factor}")
    channels = filters // 4
    layers: list[nn.Module] = [Stem(channels)]
    into = into_before = channels
    halved = False  # whether the older output is twice as high and wide

    def add(genes: Genes) -> None:
        nonlocal into, into_before, channels, halved
        halves = genes is _REDUCTION
        channels = 2 * channels if halves else channels
        cell = AmoebaCell(genes, into, into_before, channels, halves=halves, halved=halved)
        layers.append(cell)
        into, into_before, halved = cell.channels, into, halves

    add(_REDUCTION)
    for _ in range(3):
        for genes in (_REDUCTION, *[_NORMAL] * (cells // 3)):
            add(genes)
    return nn.Sequential(*layers, Head(into, classes, dropout))
