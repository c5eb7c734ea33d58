"""What ranks need sooner or later: imported by the launcher, once for all of them."""

import contextlib

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.export
from torch import nn

import gapless.pipeline.pipeline
import gapless.run.ranks.many_processes  # noqa: F401
from gapless.errors import ConfigError
from gapless.schedule.recipes.optimal.cp_sat import solver_module
from tests.unneeded import leave_out

leave_out()

# What torch imports at the first use of an optimizer, and of a trace.
torch.optim.SGD([torch.zeros(1)], lr=0.1)
torch.export.export(nn.Linear(1, 1), (torch.zeros(2, 1),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
with contextlib.suppress(ConfigError):  # where there is none, its tests say so
    solver_module()
