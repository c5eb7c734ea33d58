"""What a split backward costs the host: F + I + W against plain F + B on tiny tensors, interleaved, medians.

python -m tests.stage.host_cost
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
from torch import Tensor, nn

from gapless.stage.stage import Stage
from gapless.zoo.gpt import Block


def measure(name: str, model: nn.Sequential, x: Tensor, rounds: int = 300) -> float:
    """Prints and returns the ratio."""
    split, whole = (Stage(list(model), first_layer=0, split=split) for split in (True, False))
    x = x.requires_grad_()
    grad = torch.randn_like(model(x))
    spans: list[tuple[float, ...]] = []
    clock = time.perf_counter
    for _ in range(rounds + 30):
        times = [clock()]
        outputs = model(x.detach().requires_grad_())
        times.append(clock())
        torch.autograd.backward(outputs, grad)
        times.append(clock())
        split.forward(0, x, step=0)
        times.append(clock())
        split.backward_input(0, [grad])
        times.append(clock())
        split.backward_weight(0)
        times.append(clock())
        whole.forward(0, x, step=0)
        whole.backward(0, [grad])
        times.append(clock())
        spans.append(tuple(1e6 * (end - start) for start, end in itertools.pairwise(times)))
    f, b, sf, si, sw, unsplit = (statistics.median(column) for column in zip(*spans[30:], strict=True))
    plain = statistics.median(span[0] + span[1] for span in spans[30:])
    ratio = statistics.median(sum(span[2:5]) for span in spans[30:]) / plain
    print(
        f"{name}: plain F+B {plain:.0f} us ({f:.0f} + {b:.0f}), F+I+W ({sf:.0f} + {si:.0f} + {sw:.0f}): "
        f"{ratio:.2f} times; a stage that does not split: {unsplit / plain:.2f} times"
    )
    return ratio


def main() -> None:
    torch.set_num_threads(1)
    mlp = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.ReLU())))
    measure("MLP of width 32", mlp, torch.randn(4, 32))
    measure("GPT blocks of width 32", nn.Sequential(*(Block(32, 2) for _ in range(2))), torch.randn(2, 8, 32))
    encoder = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    measure("nn.TransformerEncoderLayer of width 32", nn.Sequential(encoder), torch.randn(2, 8, 32))


if __name__ == "__main__":
    main()
