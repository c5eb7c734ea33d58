"""A pipeline in a loop of Hugging Face Accelerate: `python examples/accelerate_pipeline.py`."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator

import gapless

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=16)

pipe = gapless.Pipeline(model, devices=2, schedule="zb-h1", microbatches=4, loss=F.mse_loss)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
for x, y in loader:
    with accelerator.autocast():  # mixed_precision="bf16" works as usual
        result = pipe.step(x, y)
    pipe.clip_grad_norm_(1.0)  # the norm of all stages
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {result.loss:.4f}")
pipe.close()
accelerator.save_model(model, "accelerated")
