"""The same training by transformers.Trainer on one device and by PipelineTrainer on several."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.model.hub import VOCAB, hub

Left = dict[str, Tensor]


def rows(count: int) -> list[dict[str, Tensor]]:
    """Sentences of all lengths. A batch of one would be traced once more."""
    random = torch.Generator().manual_seed(1)
    lengths = torch.randint(4, 12, (count,), generator=random).tolist()
    return [{"input_ids": torch.randint(3, VOCAB, (length,), generator=random)} for length in lengths]


def padded(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """To a multiple of 4 above the longest: no batch is without padding, which would be traced once more."""
    width = 4 + max(len(sample["input_ids"]) for sample in samples) // 4 * 4
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = sample["input_ids"]
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def arguments(folder: Path, **more: Any) -> Any:
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        **more,
    }
    return hub().TrainingArguments(str(folder), report_to=[], disable_tqdm=True, log_level="error", **given)


def watcher() -> Any:
    """A callback that keeps parameters and the optimizer's state after each step."""

    class Watcher(hub().TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps: list[Left] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **held: Any) -> None:
            left = {name: each.detach().clone() for name, each in held["model"].named_parameters()}
            for number, kept in held["optimizer"].state_dict()["state"].items():
                left |= {f"optimizer {number} {name}": torch.as_tensor(each).clone() for name, each in kept.items()}
            self.steps.append(left)

    return Watcher()


def trained(
    kind: type[Any], model: nn.Module, args: Any, resume: str | None = None, **more: Any
) -> tuple[Any, list[Left]]:
    """The trainer, and what each of its steps left."""
    watch = watcher()
    given = {"train_dataset": rows(28), "data_collator": padded, "callbacks": [watch], **more}
    trainer = kind(model=model, args=args, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch.steps


def both(model: nn.Module, args: Any, kind: type[Any] | None = None, **more: Any) -> tuple[Any, Any]:
    """Trained on one device and on several: the same after every step. `kind` makes a trainer of its own from each."""
    from gapless.hf import PipelineTrainer

    asked: dict[str, Any] = {name: more.pop(name) for name in ("devices", "schedule", "remat") if name in more}
    own: dict[str, Any] = {
        "devices": 2,
        "schedule": "1f1b",
        "pipeline": {"intra_op_threads": torch.get_num_threads(), **more.pop("pipeline", {})},
        **asked,
    }
    kinds: list[Any] = [hub().Trainer, PipelineTrainer]
    if kind is not None:
        kinds = [type("Own", (kind, each), {}) for each in kinds]
    plain, wanted = trained(kinds[0], copy.deepcopy(model), args, **more)
    trainer, found = trained(kinds[1], model, args, **more, **own)
    assert len(found) == len(wanted) == args.max_steps
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        wrong = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert not wrong, f"step {step}: {wrong}"
    assert logged(trainer) == logged(plain)
    return plain, trainer


def right(prediction: Any) -> dict[str, float]:
    """How many tokens were foretold."""
    logits, labels = (torch.as_tensor(each) for each in prediction)
    return {"right": ((logits[:, :-1].argmax(-1) == labels[:, 1:]) & (labels[:, 1:] != -100)).sum().item()}


def equal(one: Any, other: Any) -> bool:
    """Tensors by their bits, whatever they are in."""
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def logged(trainer: Any) -> list[dict[str, Any]]:
    """All but what was measured by a clock."""
    times = ("runtime", "per_second", "preparation_time")
    return [
        {name: value for name, value in line.items() if not name.endswith(times)} for line in trainer.state.log_history
    ]


class OwnLoss:
    """As people override it, with a loss of the logits; it changes the batch, which may happen once only."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        labels.copy_(torch.where(labels < 0, labels, (labels + 1) % VOCAB))
        outputs = model(**inputs)
        logits, targets = outputs.get("logits")[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.2, reduction="sum")
        loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss
