"""Trainer where its process is one of several ranks: what they do together, and what only one of them writes.

A rank updates the weights of its own stages. Where Trainer wants the model or the optimizer as a whole, the ranks tell
each other first; the files are those of one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from gapless.errors import ConfigError
from gapless.hf.trainer_ranks import RankAccelerator, TrainerRanks
from gapless.hf.whole_checkpoint import begin
from gapless.pipeline.pipeline import Pipeline


class RankTrainer(Trainer):  # type: ignore[misc]
    """`ranks` is None in one process, where all is as in Trainer."""

    ranks: TrainerRanks | None
    pipe: Pipeline
    current_flos: float
    _loss_only = False  # what the evaluation under way is for
    _waiting: str | None = None  # a checkpoint whose optimizer is loaded when there are parameters
    _counted: tuple[Any, float] = (None, 0.0)  # batches of this step and size, and their operations
    _frozen: Mapping[str, int] = {}  # versions of what did not learn when training began

    def create_accelerator_and_postprocess(self) -> None:
        """With batches for each pipeline."""
        super().create_accelerator_and_postprocess()
        if self.ranks is not None:
            self.accelerator.__class__ = RankAccelerator
            self.accelerator.ranks = self.ranks
            self.accelerator.clip = lambda most, kind: self.pipe.clip_grad_norm_(most, kind)
            self.accelerator.dataloader_config.dispatch_batches = False

    def is_world_process_zero(self) -> bool:
        """Whether it writes."""
        return bool(super().is_world_process_zero()) if self.ranks is None else self.ranks.is_first

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """In one process only."""
        if self.ranks is not None:
            raise ConfigError("hyperparameter_search tries other values on each rank: run it in one process")
        return super().hyperparameter_search(*args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> float:
        """Trainer's, which counts all parameters of the model for every batch: here once for batches of one size."""
        key = self.state.global_step, [(name, getattr(each, "shape", None)) for name, each in inputs.items()]
        if self._counted[0] != key:
            self._counted = key, super().floating_point_ops(inputs)
        return self._counted[1]

    def _wait(self) -> None:
        if self.ranks is not None:
            self.ranks.wait()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _gather_model(self) -> None:
        """The model is whole here: what learns in other stages comes from there."""
        if self.ranks is None or self._is_empty():
            return
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        frozen = [(name, each._version) for name, each in parameters.items() if not each.requires_grad]
        same = {name for name, version in frozen if self._frozen.get(name) == version}
        held = self.pipe.state_dict(whole=False)
        own = {name: each for name, each in held.items() if name not in same}
        others = {name: each for name, each in self.ranks.merged(own).items() if name not in own}
        self.model.load_state_dict(others, strict=False)
        for name in same - held.keys():  # they count as loaded
            torch.autograd.graph.increment_version(parameters[name])

    def _is_empty(self) -> bool:
        """Whether weights to save are not here: they are other ranks', or its first batch has not come. Adapters are
        everywhere.
        """
        return not hasattr(self.model, "peft_config") and any(each.is_meta for each in self.model.parameters())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._is_empty():
            self._refill(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._is_empty():
            self._refill(Path(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    def _refill(self, folder: Path) -> None:
        """Each rank takes its own from the files, when its stages are made or now."""
        weights = getattr(self.model, "gapless_weights", None)
        if weights is None:
            raise ConfigError(
                "a checkpoint can't be loaded into a model on the meta device: build it with gapless.hf.empty_model"
            )
        weights.open(folder)
        if self.pipe.partition:
            held = self.pipe.state_dict(whole=False)
            self.pipe.load_state_dict({name: weights[name] for name in held}, strict=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """A state goes where its parameter is, so these must be there."""
        if checkpoint is not None and self._is_empty() and not self.pipe.partition:
            self._waiting = checkpoint
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_what_waits(self) -> None:
        """The first batch has come."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            super()._load_optimizer_and_scheduler(waiting)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Trainer's; all ranks call it. Of a model that no rank has whole, each writes what it has."""
        if self.ranks is not None and self._is_empty():
            folder = Path(output_dir or self.args.output_dir)
            self.pipe.save_pretrained(folder)
            if self.args.should_save:
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(folder)
                torch.save(self.args, folder / TRAINING_ARGS_NAME)
            self._wait()
            return
        self._gather_model()
        with _same_configs(self.model):
            super().save_model(output_dir, _internal_call)
        self._wait()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        begin(Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)
        self._wait()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.ranks is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        held = set(self.pipe.parameters())
        order = [each for group in self.optimizer.param_groups for each in group["params"]]
        elsewhere = {number for number, each in enumerate(order) if each not in held}
        whole = self.optimizer.state_dict()
        own = {key: value for key, value in whole["state"].items() if key not in elsewhere}
        found = self.ranks.merged(own)
        whole["state"] = {key: found[key] for key in sorted(found, key=lambda key: (isinstance(key, str), key))}
        if self.args.should_save:
            torch.save(whole, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _forget_elsewhere(self) -> None:
        """What was loaded for the parameters of other ranks; training begins."""
        named = self.model.named_parameters(remove_duplicate=False)
        self._frozen = {name: each._version for name, each in named if not each.requires_grad}
        held = set(self.pipe.parameters())
        for each in [each for each in self.optimizer.state if isinstance(each, nn.Parameter) and each not in held]:
            del self.optimizer.state[each]

    def _save_rng_state(self, output_dir: str) -> None:
        """That of a pipeline's first rank; those of the others are the same."""
        if self.ranks is None or self.ranks.device == 0:
            super()._save_rng_state(output_dir)

    # -- what all ranks are to know -----------------------------------------------------------------------------------

    def store_flos(self) -> None:
        """Of all replicas."""
        if self.ranks is not None:
            mine = torch.tensor(self.current_flos, dtype=torch.float64, device=self.args.device)
            self.current_flos = self.ranks.of_replicas(mine).sum().item()
        super().store_flos()

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.ranks is not None and self.control.should_log:
            tr_loss.copy_(self.ranks.of_replicas(tr_loss).mean())
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)

    def _own(self, losses: Sequence[Tensor], count: int) -> Sequence[Tensor]:
        """Of the losses of all replicas those of this one."""
        if self.ranks is None:
            return losses
        if len(losses) != count * self.ranks.replicas:
            raise ConfigError(
                f"this replica has {count} batches of an update with {len(losses)}, but all must have as many: leave "
                "even_batches as it is, or set dataloader_drop_last=True"
            )
        return losses[self.ranks.replica * count :][:count]

    def _check_counted(self, dataloader: Any) -> None:
        """Samples that fill up the last batches are dropped again, where somebody knows how many there are."""
        replicas = 1 if self.ranks is None else self.ranks.replicas
        if replicas > 1 and isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            raise ConfigError(
                f"an IterableDataset can't be evaluated by dp={replicas} pipelines, since it is not known which "
                "samples come twice: use a dataset with a length, or dp=1"
            )

    def _shared(self, outputs: Any) -> Any:
        """What the last stage has returned, on all ranks; only the loss, where nothing else is looked at."""
        if self.ranks is None:
            return outputs
        if outputs is not None and self._loss_only and self._takes_loss_as_it_is():
            outputs = [
                {"loss": each["loss"]} if isinstance(each, dict) and "loss" in each else each for each in outputs
            ]
        placement = self.pipe.schedule.placement
        return self.ranks.said(placement.device(placement.num_stages - 1, 0), outputs)

    def _takes_loss_as_it_is(self) -> bool:
        own = (
            type(self).compute_loss is not Trainer.compute_loss
            or type(self).prediction_step is not Trainer.prediction_step
        )
        return not (own or self.label_smoother is not None or self.compute_loss_func is not None)


@contextmanager
def _same_configs(model: nn.Module) -> Iterator[None]:
    """A save writes into the config of a model, which would be traced again for that, and on one rank only."""
    configs = [vars(part)["config"] for part in model.modules() if hasattr(vars(part).get("config"), "__dict__")]
    before = [(config, dict(vars(config))) for config in configs]
    try:
        yield
    finally:
        for config, values in before:
            vars(config).clear()
            vars(config).update(values)
