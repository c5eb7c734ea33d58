"""A pipeline in a LightningModule: `python examples/lightning_pipeline.py`."""

import lightning
import torch
import torch.nn as nn
import torch.nn.functional as F

import gapless


class Pipelined(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.automatic_optimization = False
        self.model = model
        self.pipe = gapless.Pipeline(model, devices=2, schedule="zb-h1", microbatches=4, loss=F.mse_loss)

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        result = self.pipe.step(*batch)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.lr_schedulers().step()
        self.log("loss", result.loss)

    def validation_step(self, batch, number):
        self.log("val_loss", self.pipe.evaluate(*batch, outputs=False).loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
samples = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=16)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, default_root_dir="lightning")
trainer.fit(Pipelined(model), loader, loader)
