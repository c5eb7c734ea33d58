"""Ten steps, a checkpoint, ten more. Run it again with the same folder, and it goes on from there.

    python examples/save_and_resume.py runs/first --devices 4
    python examples/save_and_resume.py runs/first --devices 2

The number of devices may change between two runs; the bits do not.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import gapless
from gapless.checkpoint import Checkpoints


def main() -> None:
    parser = argparse.ArgumentParser(description="train for some steps, save, and go on from there the next time")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(8)))
    with gapless.Pipeline(model, devices=arguments.devices, microbatches=4, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        with Checkpoints(arguments.folder, pipe) as run:
            if run.latest:
                run.load(optimizer)
                print(f"goes on from step {pipe.steps}")
            for _ in range(arguments.steps):
                x = torch.randn(8, 8)  # torch's random numbers are in the checkpoint too
                pipe.step(x, -x)
                optimizer.step()
                optimizer.zero_grad()
                if pipe.steps % 10 == 0:
                    run.save(optimizer)
        print(f"saved at step {pipe.steps}")


if __name__ == "__main__":
    main()
