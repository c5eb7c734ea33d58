"""Trains the model of a config once more in a plain loop on one device, and compares the weights bit for bit.

    python examples/prove.py examples/demo.toml demo/weights.safetensors --steps 50

The loop is the one that anybody would write: each microbatch forward and backward, one after the other, then clipping
and the optimizer's step. The model, the data and the optimizer are those of the config. There is no pipeline in it.
"""

import argparse
import sys

import torch
from safetensors.torch import load_file
from torch import nn

import gapless
from gapless.train.config.config import read_config
from gapless.train.job import build


def main() -> None:
    parser = argparse.ArgumentParser(description="compare a run of gapless train with a plain training loop")
    parser.add_argument("config", help="that the run was made with")
    parser.add_argument("weights", help="of the run, as `gapless checkpoint export` writes them")
    parser.add_argument("--steps", type=int, required=True, help="that the run has made")
    parser.add_argument("--set", action="append", default=[], dest="settings", help="as for gapless train")
    arguments = parser.parse_args()

    config = read_config(arguments.config, arguments.settings)
    torch.set_num_threads(1)  # as many as each device of the run has
    job = build(config)
    model, parts, loss = job.model, config.pipeline.microbatches, job.loss
    assert isinstance(model, nn.Sequential)
    assert loss is not None
    assert parts is not None
    optimizer = job.optimizer(list(model.parameters()))
    scheduler = job.scheduler(optimizer)
    for step, (x, y) in zip(range(arguments.steps), job.batches, strict=False):
        for number, (inputs, target) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            value = inputs
            for index, layer in enumerate(model):
                torch.manual_seed(gapless.seed_of(config.train.seed, step, number, index))  # for dropout
                value = layer(value)
            (loss(value, target) * (len(inputs) / len(x))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.clip or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    weights, plain = load_file(arguments.weights), model.state_dict()
    different = [name for name in plain if not torch.equal(weights[name], plain[name])]
    if different or weights.keys() != plain.keys():
        sys.exit(f"{len(different)} of {len(plain)} tensors differ from plain training: {', '.join(different[:5])}")
    print(f"all {len(plain)} tensors are bit-identical to {arguments.steps} steps of plain training on one device")


if __name__ == "__main__":
    main()
