"""ResNets as people write them (He et al., 2015): a stem, four groups of residual blocks, a head.

It is a sequence of layers, so a pipeline can cut it anywhere between its blocks. Its batch norms count samples, so it
is also the model on which `batchnorm=` is tried.
"""

from typing import Any

from torch import Tensor, nn

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _conv(inside: int, outside: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, size, stride, padding=size // 2, bias=False)


def _shortcut(inside: int, outside: int, stride: int) -> nn.Module:
    """What is added to a block's result: its input, brought to the same shape."""
    if stride == 1 and inside == outside:
        return nn.Identity()
    return nn.Sequential(_conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))


class Basic(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inside, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.shortcut = _shortcut(inside, width, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, which narrow and widen again."""

    expansion = 4

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = width * self.expansion
        self.conv1, self.norm1 = _conv(inside, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = _conv(width, outside, 1), nn.BatchNorm2d(outside)
        self.shortcut = _shortcut(inside, outside, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def resnet(depth: int = 18, *, classes: int = 1000, width: int = 64, channels: int = 3) -> nn.Sequential:
    """A ResNet of 18, 34, 50 or 101 layers: images of shape (batch, channels, height, width) in, logits out.

    `width` is that of the first group; each of the others is twice as wide as the one before it.
    """
    if depth not in _BLOCKS:
        raise ValueError(f"a ResNet of depth {depth} is not known: choose one of {', '.join(map(str, _BLOCKS))}")
    block: type[Basic] | type[Bottleneck] = Basic if depth < 50 else Bottleneck
    stem = nn.Sequential(
        _conv(channels, width, 7, stride=2), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    layers: list[nn.Module] = [stem]
    inside = width
    for group, count in enumerate(_BLOCKS[depth]):
        for number in range(count):
            stride = 2 if group > 0 and number == 0 else 1
            layers.append(block(inside, width * 2**group, stride))
            inside = width * 2**group * block.expansion
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))
    return nn.Sequential(*layers, head)
