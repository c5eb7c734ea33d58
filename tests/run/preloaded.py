"""What ranks need sooner or later: imported by the launcher, once for all of them."""

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.export

import gapless.pipeline.pipeline
import gapless.run.ranks.many_processes  # noqa: F401

torch.optim.SGD([torch.zeros(1)], lr=0.1)  # what torch imports at the first use
