"""Three consecutive steps of a pipeline whose optimizer step does not wait, measured, for docs/how-it-works.md.

`python -m tests.measured_picture`, from the root of the project and on an idle machine, measures and draws them again.
Devices are emulated: threads whose F, I and W take 10 ms each and no processor.
"""

import re
import sys

import torch
from torch import Tensor, nn

import gapless
from gapless.schedule.timeline import Timeline
from gapless.zoo.emulated import Emulated
from tests.pictures import FOLDER


def three_steps(seconds: float = 0.01) -> Timeline:
    """Of zb-h2 on 3 devices, after two steps in which the pipeline fills."""
    layers = [Emulated(forward=seconds, input_grad=seconds, weight_grad=seconds) for _ in range(3)]
    with gapless.Pipeline(
        nn.Sequential(*layers), devices=["cpu"] * 3, schedule="zb-h2", microbatches=5, loss=_loss, timeline=True
    ) as pipe:
        training = pipe.training(torch.optim.SGD(pipe.parameters(), lr=0.1), max_norm=1e9)
        x = layers[0].samples(5).requires_grad_()
        results = [training.step(x, torch.zeros(5)) for _ in range(6)][-4:-1]
        return gapless.join_steps([each.timeline for each in results if each.timeline is not None])


def _loss(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.sum() + target.sum()


if __name__ == "__main__":
    measured = three_steps()
    file = FOLDER / "three-steps.svg"
    gapless.draw(file, measured, width=240)
    file.write_text(re.sub(r"><title>[^<]*</title></\w+>", "/>", file.read_text("utf-8")), "utf-8", newline="\n")
    print(measured, file=sys.stderr)
