"""Hugging Face's Trainer, where the batches that it accumulates are the microbatches of a pipeline.

Trainer fetches the batches of an update together (`get_batch_samples`) and then trains on one after the other
(`training_step`). Here the first of these calls runs the pipeline on all of them, and each returns the loss of its own:

    get_batch_samples    batches 0 1 2 3, each with its own padding
    training_step 0      the pipeline: forward and backward of 0 1 2 3     loss 0
    training_step 1                                                        loss 1
    ...
    clipping, the optimizer, the scheduler, callbacks, checkpoints         Trainer's own
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainingArguments

from gapless.errors import ConfigError
from gapless.guards.batches_and_losses import FETCHED_BATCHES
from gapless.hf.grouped_loader import GroupedLoader
from gapless.hf.model_proxy import (
    PipelinedModel,
    UnchangingLoss,
    answered,
    call_in,
    checkpoints,
    contents,
    has_own_loss,
    unchanged,
)
from gapless.hf.rank_trainer import RankTrainer
from gapless.hf.trainer_ranks import devices_of, ranks_of
from gapless.hf.unsupported import CHECKPOINTING, check_arguments, check_model, check_pipeline
from gapless.hf.whole_checkpoint import resumed
from gapless.pipeline.arguments.checks import at_least_one
from gapless.pipeline.pipeline import Pipeline
from gapless.pipeline.result import Result
from gapless.plan.plan import Plan
from gapless.stage.autocast import without_autocast
from gapless.stage.devices import Devices
from gapless.stage.stage import Remat


class PipelineTrainer(RankTrainer):
    """`transformers.Trainer` with the model cut into stages: in one process with a thread for each device, or under
    torchrun with a process for each.

    All arguments of Trainer, and these:

    devices       in one process: how many, "cuda" for all GPUs, or a list of torch devices. Under torchrun every rank
                  is one, and this may be left out
    dp            under torchrun: how many pipelines share the batches; each has its part of the ranks
    schedule      a name from `gapless schedules`, or a Plan; by default as `gapless.Pipeline`
    microbatches  the batches of one update; by default `gradient_accumulation_steps` of the arguments, which is the
                  same thing
    remat         "none", "stage", "layer" or one for each stage; by default "stage" with `activation_checkpointing`
                  (before transformers 5.23 `gradient_checkpointing`)
    pipeline      further arguments of `gapless.Pipeline`, such as {"timeline": True, "intra_op_threads": 1}

    `pipe` is the pipeline, and `result` the result of its last step.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        devices: Devices | None = None,
        dp: int = 1,
        schedule: str | Plan | None = None,
        microbatches: int | None = None,
        remat: Remat | Sequence[Remat] | None = None,
        pipeline: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else copy.copy(args)
        check_pipeline(schedule, pipeline or {})
        check_arguments(args, pipeline or {})
        check_model(model)
        args._n_gpu = min(args.n_gpu, 1)  # several would be DataParallel
        args.gradient_accumulation_steps = _accumulated(args, schedule, microbatches)
        self.ranks = ranks_of(args, dp, devices)
        self._asked = {
            **({"mesh": self.ranks.mesh, "tied": "exact"} if self.ranks else {"devices": devices_of(devices, args)}),
            "schedule": schedule,
            "microbatches": args.gradient_accumulation_steps,
            "seed": args.seed,
            "remat": ("stage" if getattr(args, CHECKPOINTING) else "none") if remat is None else remat,
            **(pipeline or {}),
        }
        if isinstance(schedule, Plan) and remat is None:
            del self._asked["remat"]
        self._batches: list[Any] = []  # of this update
        self._losses: list[Tensor] = []  # of those that are trained on
        self._seen: list[Any] = []  # what was in them then
        self.result: Result | None = None
        super().__init__(model, args, *more, **options)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError(
                "accelerate is set up for DeepSpeed or FSDP, which a pipeline can't use: start the script with python"
            )
        self._make_pipeline()

    # -- the model ----------------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The pipeline puts each stage on its own device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The pipeline in place of the model, for training and for evaluation; made anew for another model."""
        if self._pipelined.module is not self.model or checkpoints(self.model):
            self.pipe.close()
            self._make_pipeline()
        return self._pipelined

    def _make_pipeline(self) -> None:
        if checkpoints(self.model):
            getattr(self.model, f"{CHECKPOINTING}_disable")()
            if self._asked.get("remat") == "none":
                self._asked["remat"] = "stage"
        self._unchanging = None if has_own_loss(self) else UnchangingLoss(self, PipelineTrainer._loss)
        self.pipe = Pipeline(self.model, loss=self._unchanging or self._loss, loss_weight="sum", **self._asked)
        self._pipelined = PipelinedModel(self.model, self._evaluated)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; what `activation_checkpointing` asks for, remat does. A checkpoint that a kill has left half
        written is passed over for the last whole one.
        """
        self._wait()  # for what another rank still writes
        checkpoint = resumed(resume_from_checkpoint, self.args.output_dir)
        asked = getattr(self.args, CHECKPOINTING)
        setattr(self.args, CHECKPOINTING, False)
        try:
            output = super().train(checkpoint, *args, **kwargs)
            self._gather_model()
            return output
        finally:
            setattr(self.args, CHECKPOINTING, asked)

    # -- training -----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; they are remembered, since the first of them starts the pipeline."""
        self._batches, num_items = super().get_batch_samples(*args, **kwargs)
        self._losses = []
        return self._batches, num_items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The loss of one batch. The first one of an update runs the forward and backward of all."""
        if not self._losses:
            self._losses = self._trained(self._batches or [inputs], num_items_in_batch)
            self._seen = [contents(batch) for batch in self._batches]
        number = len(self._batches) - len(self._losses)
        if self._batches and (self._batches[number] is not inputs or not unchanged(self._seen[number], inputs)):
            raise FETCHED_BATCHES.refusal(
                "training_step got another batch than the one that was fetched, or has changed it, and the pipeline "
                "has trained on that"
            )
        loss = self._losses.pop(0)
        if not self._losses:
            self._batches = []
        return loss

    def _trained(self, batches: Sequence[Any], num_items: Any) -> list[Tensor]:
        """The losses as Trainer logs them; gradients are in `.grad`."""
        self._wrap_model(self.model).train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        targets = [{"inputs": dict(self._prepare_inputs(batch)), "num_items": num_items} for batch in batches]
        own = has_own_loss(self)  # which may change tensors of a batch, twice
        looked = [pytree.tree_map_only(Tensor, Tensor.clone, target) if own else target for target in targets]
        calls = [call_in(partial(self._compute_loss, target), self.model) for target in looked]
        if any(call is None for call in calls):
            raise ConfigError("compute_loss does not call the model, so there is nothing to run on a pipeline")
        if own and (self.result is None or self.args.device.type == "cpu"):
            targets = [target | {"call": call} for target, call in zip(targets, calls, strict=True)]
        share = 1 if self._is_scaled(num_items) else len(batches)
        replicas = 1 if self.ranks is None else self.ranks.replicas  # whose gradients are averaged
        if self._unchanging is not None:
            self._unchanging.look()
        self.pipe.steps = self.state.global_step  # on which random numbers depend, also after a resume
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            scaler = getattr(self.accelerator, "scaler", None)
            result = self.pipe.step(calls, targets, cut=False, weight=1 / (share * replicas), scaler=scaler)
        if self.result is None:
            self._settle_optimizer()
        self.result = result
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            clear_device_cache()
        return [
            (loss / share if share > 1 else loss).to(self.args.device)
            for loss in self._own(result.losses, len(batches))
        ]

    def _loss(self, outputs: Any, target: Any) -> Tensor:
        """Of a microbatch, on the last stage. Autocast is around Trainer's model, and not around what it makes of the
        outputs, which are float32.
        """
        with contextlib.ExitStack() as stack:
            if self.accelerator.native_amp:
                outputs = convert_outputs_to_fp32(lambda: outputs)()
                stack.enter_context(without_autocast())
                stack.enter_context(self.compute_loss_context_manager())
            loss: Tensor = answered(partial(self._compute_loss, target), self.model, outputs, target.get("call"))
        return loss

    def _compute_loss(self, target: Any, model: Any) -> Any:
        return self.compute_loss(model, dict(target["inputs"]), num_items_in_batch=target["num_items"])

    def _is_scaled(self, num_items: Any) -> bool:
        """Whether losses are parts of the mean of all batches already; the rule is that of Trainer's training_step."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        return bool(self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None

    def _settle_optimizer(self) -> None:
        """A state that was loaded before the first batch came is where its parameters were then."""
        self._load_what_waits()
        if self.ranks is not None:
            self._forget_elsewhere()
        for parameter, state in getattr(self.optimizer, "state", {}).items():
            if any(
                isinstance(each, Tensor) and each.dim() and each.device != parameter.device for each in state.values()
            ):
                self.optimizer.load_state_dict(self.optimizer.state_dict())
                return

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Trainer's, on as many batches at a time as there are microbatches."""
        self._check_counted(dataloader)
        self._wrap_model(self.model, training=False)
        only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        own = has_own_loss(self) or type(self).prediction_step is not Trainer.prediction_step

        def predicted(batch: Any, it: Any) -> Any:
            return self.prediction_step(it, batch, only, ignore_keys)

        def before(batches: list[Any]) -> None:
            # What is the user's own may take things out of a batch, or change them, and it will get it once more.
            copied = copy.deepcopy if own else copy.copy
            calls = [call_in(partial(predicted, copied(batch)), self.model) for batch in batches]
            self._pipelined.foresee([call for call in calls if call is not None])

        ahead = GroupedLoader(dataloader, self._asked["microbatches"], before)
        self._loss_only = bool(only)
        try:
            return super().evaluation_loop(ahead, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        finally:
            self._loss_only = False

    def _evaluated(self, calls: Sequence[Any]) -> list[Any]:
        """What the model returns for each of these calls."""
        most, outputs = self._asked["microbatches"], []
        with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
            for first in range(0, len(calls), most):
                made = self.pipe.evaluate(list(calls[first : first + most]), cut=False).outputs
                outputs += self._shared(made)
        if self.accelerator.native_amp:
            outputs = convert_outputs_to_fp32(lambda: outputs)()
        return list(pytree.tree_map_only(Tensor, lambda each: each.to(self.args.device), outputs))


def _accumulated(args: Any, schedule: Any, microbatches: int | None) -> int:
    """How many batches make an update, from whoever says it."""
    asked = schedule.microbatches if microbatches is None and isinstance(schedule, Plan) else microbatches
    steps: int = args.gradient_accumulation_steps
    if asked is None:
        if steps == 1:
            raise ConfigError(
                "gradient_accumulation_steps is 1, and a pipeline needs several microbatches to keep its devices busy: "
                "set it, or microbatches=, to about four times the number of devices, or microbatches=1 if you mean it"
            )
        return steps
    if steps not in (1, asked):
        raise ConfigError(
            f"microbatches is {asked}, but gradient_accumulation_steps is {steps}, and they are the same thing: give "
            "one of them"
        )
    return at_least_one("microbatches", asked)
