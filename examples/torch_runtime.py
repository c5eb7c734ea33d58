"""A schedule of gapless in the runtime of torch.distributed.pipelining.

gapless show v-min --devices 2 --microbatches 4 --format csv > mine.csv
torchrun --nproc-per-node 2 examples/torch_runtime.py mine.csv
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import gapless


def train(path):
    schedule = gapless.Schedule.parse(Path(path).read_text())
    count, rank = schedule.num_stages, dist.get_rank()
    mine = [stage for stage in range(count) if schedule.placement.device(stage, 0) == rank]

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)]
    stages = [PipelineStage(layers[stage], stage, count, torch.device("cpu")) for stage in mine]
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=F.mse_loss)
    runtime._load_csv(path)

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    inputs = (x,) if 0 in mine else ()
    runtime.step(*inputs, target=y if count - 1 in mine else None)
    return layers, mine, x, y


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1])
    dist.destroy_process_group()
