"""A config with a model and data of one's own, in files beside it."""

from pathlib import Path

from gapless.plan.plan import Plan
from gapless.train.config.config import Config
from gapless.train.job import build
from gapless.train.run.trainer import Callback, Step, Trainer
from gapless.train.run.training import make_trainer

MINE = """
import torch
from torch import nn


def make(width=8, depth=4, dropout=0.0):
    blocks = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth))
    return nn.Sequential(*blocks, nn.Linear(width, 3))


def batches(minibatch, seed, count=4, width=8):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(minibatch, width, generator=generator)
        yield x, x[:, :3].argmax(dim=1)


def no_number(outputs, target):
    return outputs.sum() * float("nan")


def failing(width=8):
    raise ValueError("far too\\nwide")


def fixed():
    return [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))]


def nothing():
    return []


def without_target(minibatch):
    return [(torch.zeros(minibatch, 8), None)]


def another_size(minibatch):
    return [(torch.zeros(minibatch, 8), torch.zeros(minibatch - 2, dtype=torch.long))]


def triples():
    return [(1, 2, 3)]


def number():
    return 3


def ends_badly(minibatch):
    yield torch.zeros(minibatch, 8), torch.zeros(minibatch, dtype=torch.long)
    raise KeyError("no more")


def steep(outputs, target):
    return nn.functional.cross_entropy(outputs, target) + (0 * outputs).sqrt().sum()
"""

CONFIG = """
[model]
name = "mine.py:make"
arguments = { depth = 5, dropout = 0.25 }

[data]
name = "mine.py:batches"
minibatch = 6

[loss]
name = "cross_entropy"

[optimizer]
name = "AdamW"
arguments = { lr = 0.01 }

[pipeline]
devices = ["cpu", "cpu"]
schedule = "zb-h1"
microbatches = 4

[train]
steps = 6
clip = 0.5
seed = 7
"""
GPT = """
[model]
name = "gpt"
arguments = { width = 8, depth = 2, heads = 2, context = 8 }

[data]
name = "python-source"
minibatch = 4
arguments = { context = 8 }

[pipeline]
devices = ["cpu", "cpu"]
microbatches = 2
"""


def write(folder: Path, *changes: tuple[str, str], text: str = CONFIG) -> Path:
    """A config with these words replaced."""
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "mine.py").write_text(MINE)
    file = folder / "mine.toml"
    file.write_text(text)
    return file


class Kept(Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[tuple[int, float]] = []

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)

    def on_evaluate(self, trainer: Trainer, loss: float, seconds: float) -> None:
        self.evaluations.append((trainer.step, loss))


def trained(config: Config, plan: Plan | None = None) -> list[Step]:
    """As `gapless train` trains it, but without a folder."""
    kept = Kept()
    job = build(config)
    with job.pipeline(plan) as pipe:
        trainer = make_trainer(config, job, pipe)
        trainer.callbacks.append(kept)
        trainer.run()
    return kept.steps
