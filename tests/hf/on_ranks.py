"""What ranks do in the tests of PipelineTrainer under torchrun: train as a script does, and compare with what
transformers.Trainer has left in a file.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapless.errors import ConfigError
from tests.hf.training import Left, OwnLoss, arguments, logged, padded, right, rows, trained
from tests.model.hub import gpt2, hub, llama
from tests.traced_once import Traces

hub().Trainer  # noqa: B018  # imported here, once for all ranks
from gapless.hf import PipelineTrainer  # noqa: E402

TRACES = Traces()
OWN: dict[str, Any] = {"pipeline": {"intra_op_threads": 1}}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
# How to train: arguments of TrainingArguments, and those of PipelineTrainer alone.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw": ({}, {}),
    "sgd": ({"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "cosine"}, {"schedule": "zb-h1"}),
    "evaluated": (EVALUATED, {"schedule": "interleaved"}),
    "bf16": ({"bf16": True, "label_smoothing_factor": 0.1, **EVALUATED}, {"schedule": "zb-v"}),
    "remat": ({"gradient_checkpointing": True, "by_length": True}, {"schedule": "zb-v"}),
    "gpu": ({"use_cpu": False, "bf16": True, "max_steps": 12}, {}),
}


def as_under_torchrun() -> int:
    """The variables by which accelerate knows that it is one of several; and a model is traced once for all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    TRACES.use()
    return rank


def partly_frozen() -> Any:
    """What other ranks hold and do not train is no reason not to save."""
    model: Any = gpt2()
    for part in (model.transformer.wpe, model.transformer.ln_f):
        part.requires_grad_(False)
    return model


@functools.cache
def before_ranks() -> None:
    model = partly_frozen()
    model.config.use_cache = False  # as Trainer sets it
    TRACES.trace(model, {**padded(rows(2)), "num_items_in_batch": torch.tensor(9)})


def train(kind: type[Any], folder: Path, name: str, **more: Any) -> tuple[Any, list[Left]]:
    """By one of the settings."""
    asked, own = SETTINGS[name]
    given = {**asked, **more.pop("asked", {})}
    if given.pop("by_length", False):
        new = hasattr(hub().TrainingArguments, "train_sampling_strategy")
        given |= {"train_sampling_strategy": "group_by_length"} if new else {"group_by_length": True}
    more = {**more, **({"eval_dataset": rows(10), "compute_metrics": right} if "eval_steps" in given else {})}
    if kind is not hub().Trainer:
        more = {**OWN, **own, **more}
    return trained(kind, partly_frozen(), arguments(folder, **given), **more)


def write_plain(folder: str, name: str, process: int = 0, **more: Any) -> Any:
    """What transformers.Trainer leaves; and the trainer."""
    trainer, steps = train(hub().Trainer, Path(folder, f"plain {name}"), name, **more)
    if process == 0:
        torch.save((steps, logged(trainer)), Path(folder, f"{name}.pt"))
    return trainer


def compare(trainer: Any, steps: list[Left], plain: Path) -> None:
    """After every step the parameters of this rank, at the end all, and what was logged."""
    wanted, logs = torch.load(plain, map_location="cpu")
    here = [name for name, _ in trainer.pipe.named_parameters()]
    assert len(steps) == len(wanted)
    for step, (ours, theirs) in enumerate(zip(steps, wanted, strict=True)):
        wrong = [name for name in here if not torch.equal(ours[name].cpu(), theirs[name])]
        assert not wrong, f"step {step}: {wrong}"
    ended = {name: each.cpu() for name, each in trainer.model.named_parameters()}
    wrong = [name for name, each in ended.items() if not torch.equal(each, wanted[-1][name])]
    assert not wrong, f"at the end: {wrong}"
    assert logged(trainer) == logs, f"{logged(trainer)}, but {logs}"


def same_as_plain(folder: str, *names: str) -> None:
    """All of these settings, one after the other."""
    as_under_torchrun()
    if "gpu" in names:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    for name in names:
        compare(*train(PipelineTrainer, Path(folder, f"ours {name}"), name), Path(folder, f"{name}.pt"))


SAVED: dict[str, Any] = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 9,
}
BEST |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 1.0, "save_total_limit": 1}


def lora(kind: type[Any], folder: Path, **more: Any) -> Any:
    """A trainer of adapters that has saved some."""
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    args = arguments(folder, max_steps=4, save_strategy="steps", save_steps=2)
    return trained(kind, peft.get_peft_model(llama(), config), args, **more)[0]


def stopped_early(kind: type[Any], folder: Path, **more: Any) -> Any:
    """A trainer that went back to its best weights."""
    stop = hub().EarlyStoppingCallback(early_stopping_patience=2)
    given = {"callbacks": [stop], "eval_dataset": rows(4), **more}
    return trained(kind, gpt2(), arguments(folder, **BEST), **given)[0]


def saving(folder: str) -> None:
    """A run that evaluates and saves."""
    as_under_torchrun()
    ours = train(PipelineTrainer, Path(folder, "ours"), "evaluated", asked=SAVED)
    compare(*ours, Path(folder, "evaluated.pt"))


def saving_more(folder: str) -> None:
    """Adapters, the best model, and dropout."""
    rank = as_under_torchrun()
    lora(PipelineTrainer, Path(folder, "our lora"), **OWN).save_model(f"{folder}/our adapter")
    best = stopped_early(PipelineTrainer, Path(folder, "our best"), **OWN)
    args = arguments(Path(folder, "our dropout"), max_steps=6)
    dropped = trained(PipelineTrainer, gpt2(0.2), args, schedule="zb-v", **OWN)[0]
    wanted = torch.load(Path(folder, "dropout.pt"))
    assert all(torch.equal(each, wanted[name]) for name, each in dropped.model.named_parameters())
    if rank == 0:
        torch.save((best.state.log_history, best.model.state_dict()), Path(folder, "best.pt"))


def resuming(folder: str, plain: str, *checkpoints: str) -> None:
    """From each of these to the end."""
    as_under_torchrun()
    wanted = torch.load(plain)
    for number, checkpoint in enumerate(checkpoints):
        args = {**SAVED, "save_strategy": "no"}
        trainer, _ = train(PipelineTrainer, Path(folder, f"resumed {number}"), "adamw", asked=args, resume=checkpoint)
        assert trainer.state.global_step == 5
        assert all(torch.equal(each, wanted[name]) for name, each in trainer.model.named_parameters())


def plain_replicas(folder: str, *names: str) -> None:
    """Trainer on as many devices, with DDP."""
    rank = as_under_torchrun()
    for name in names:
        write_plain(folder, name, rank)


def replicas(folder: str, *names: str) -> None:
    """Two pipelines, which share the batches."""
    as_under_torchrun()
    for name in names:
        saved = {**SETTINGS[name][0], "save_strategy": "steps", "save_steps": 2}
        ours = train(PipelineTrainer, Path(folder, f"ours {name}"), name, asked=saved, dp=2)
        compare(*ours, Path(folder, f"{name}.pt"))
        resume = str(Path(folder, f"ours {name}", "checkpoint-2"))
        again, _ = train(PipelineTrainer, Path(folder, f"again {name}"), name, dp=2, resume=resume)
        assert all(map(torch.equal, again.model.parameters(), ours[0].model.parameters()))
        assert logged(again)[:-1] == logged(ours[0])[:-1]


class Endless(torch.utils.data.IterableDataset[Any]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(rows(10))


def other_ways(kind: type[Any], folder: Path, **own: Any) -> list[Any]:
    """Numbers of runs of all kinds: a loss of its own, no length, a model made anew, predictions, one loss alone."""
    args = arguments(folder, per_device_eval_batch_size=4)
    made = type("Own", (OwnLoss, kind), {})
    trainer, _ = trained(made, gpt2(), args, eval_dataset=rows(10), **own)
    found: list[Any] = [logged(trainer), trainer.evaluate()["eval_loss"]]
    more = {"data_collator": padded, "train_dataset": Endless(), "eval_dataset": Endless(), **own}
    trainer = kind(args=args, model_init=lambda: gpt2(), **more)
    for _ in range(2):
        trainer.train()
        found.append((trainer.evaluate()["eval_loss"], logged(trainer)))
    found += [torch.as_tensor(each) for each in trainer.predict(rows(6))[:2]]
    return [*found, *(each.detach() for each in trainer.model.parameters())]


def all_other_ways(folder: str) -> None:
    """The same numbers on every rank, and what only ranks are told."""
    rank = as_under_torchrun()
    torch.save(other_ways(PipelineTrainer, Path(folder, "ways"), **OWN), Path(folder, f"ways {rank}.pt"))
    for message, given in REFUSED.items():
        args = arguments(Path(folder, "refused"))
        vars(args).update(given.get("args", {}))
        with pytest.raises(ConfigError, match=message):
            PipelineTrainer(gpt2(), args, **given.get("own", {}))
    trainer = PipelineTrainer(gpt2(), arguments(Path(folder, "refused")), devices=2)
    with pytest.raises(ConfigError, match="hyperparameter_search tries other values on each rank"):
        trainer.hyperparameter_search()
    assert (trainer.is_world_process_zero(), trainer.args.should_save) == (
        (True, True) if rank == 0 else (False, False)
    )
    assert type(copy.deepcopy(trainer.args)) is hub().TrainingArguments


REFUSED: dict[str, dict[str, Any]] = {
    "fp16=True scales gradients on each rank alone": {"args": {"fp16": True}},
    "auto_find_batch_size=True may find another size on each rank": {"args": {"auto_find_batch_size": True}},
    "eval_use_gather_object=True gathers from all ranks": {"args": {"eval_use_gather_object": True}},
    "pipeline= has layers, of which a rank keeps its own alone": {"own": {"pipeline": {"layers": []}}},
    "devices is 3 devices, but this is one of 2 ranks with dp=1, so a pipeline has 2": {"own": {"devices": 3}},
    "dp is 3, but the 2 ranks can't be divided evenly": {"own": {"dp": 3}},
    "dp is 0, but it must be a whole number of at least 1": {"own": {"dp": 0}},
}
