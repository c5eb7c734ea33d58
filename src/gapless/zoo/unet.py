"""A U-Net as people write it (Ronneberger et al., 2015): down, across, up, and a long skip on every level.

Its forward is no sequence: what a level makes on the way down is needed again on the way up, so a pipeline has to trace
it and to carry the skips from stage to stage.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Double(nn.Module):
    """Two 3x3 convolutions, each with its norm and activation."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.norm2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        return self.relu(self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """`depth` levels down and up again, the first `width` wide: images of shape (batch, channels, height, width)
    in, a map of logits of that height and width out. Both must be divisible by 2 to the power of `depth`.
    """

    def __init__(self, *, depth: int = 4, width: int = 64, channels: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.enter = Double(channels, width)
        self.down = nn.ModuleList(Double(widths[level], widths[level + 1]) for level in range(depth))
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(widths[level + 1], widths[level], 2, stride=2) for level in reversed(range(depth))
        )
        self.up = nn.ModuleList(Double(2 * widths[level], widths[level]) for level in reversed(range(depth)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


unet = UNet  # under the name that a config has for it
