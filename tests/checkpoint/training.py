"""What the tests of checkpoints train: a GPT with dropout, AdamW in two groups, a scheduler, and minibatches that are
drawn from torch's own random numbers, so that a resume needs all of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gapless
from gapless.zoo.gpt import gpt, next_token_loss

SEED = 11
DEPTH = 16  # for eight devices with two stages each
SCHEDULES = {1: "gpipe", 2: "zb-v", 4: "1f1b", 8: "interleaved"}


class Training(NamedTuple):
    """A pipeline, and what a user has beside it."""

    pipe: gapless.Pipeline
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def save(self, folder: Any, extra: Any = None) -> None:
        self.pipe.save(folder, self.optimizer, self.scheduler, extra)

    def load(self, folder: Any) -> Any:
        return self.pipe.load(folder, self.optimizer, self.scheduler)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(13, (4, 6))
            self.pipe.step(tokens[:, :5], tokens[:, 1:])
            self.pipe.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


def model_of(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(3)
    return gpt(vocab=13, width=8, depth=depth - 3, heads=2, context=6, dropout=0.1)


def training(model: nn.Module | None = None, optimizer: Any = None, **options: Any) -> Training:
    """Of a fresh model, with random numbers that start anew."""
    pipe = gapless.Pipeline(
        model_of() if model is None else model, **{"microbatches": 2, "loss": next_token_loss, "seed": SEED, **options}
    )
    decayed = [each for each in pipe.parameters() if each.dim() > 1]
    others = [each for each in pipe.parameters() if each.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    made = torch.optim.AdamW(groups, lr=0.01) if optimizer is None else optimizer(pipe.parameters())
    torch.manual_seed(7)
    return Training(pipe, made, torch.optim.lr_scheduler.CosineAnnealingLR(made, 200))


def left(each: Training) -> dict[str, Tensor]:
    """All that training has left in this process: weights, and what the optimizer keeps, by name."""
    found = {name: value.detach().clone() for name, value in each.pipe.named_parameters()}
    for name, parameter in each.pipe.named_parameters():
        for key, value in each.optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value.clone()
    found["lr"] = torch.tensor([group["lr"] for group in each.optimizer.param_groups])
    found["random"] = torch.get_rng_state()
    return found


def assert_as_in(whole: Mapping[str, Tensor], part: Mapping[str, Tensor]) -> None:
    """What one process has is what the whole has."""
    for name, value in part.items():
        assert torch.equal(value, whole[name]), name
