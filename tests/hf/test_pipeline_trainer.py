"""PipelineTrainer against transformers.Trainer on one device: the same bits, logs and files."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.model.traced import settled
from gapless.model.traced.trace import Trace
from tests.hf.training import OwnLoss, arguments, both, equal, padded, right, rows, trained
from tests.model.hub import bert, gpt2, hub, llama, made, t5

pytestmark = pytest.mark.usefixtures("traced_once")


def test_gpt2_on_4_devices_is_gpt2_on_one_after_every_step(tmp_path: Path) -> None:
    """The last update of an epoch has 2 batches of 4, the last batch of an evaluation 2 samples of 4."""
    args = arguments(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4)
    more: dict[str, Any] = {"eval_dataset": rows(10), "compute_metrics": right}
    plain, trainer = both(gpt2(), args, devices=4, schedule="zb-v", **more)
    assert [line["eval_right"] for line in trainer.state.log_history if "eval_right" in line]
    assert str(trainer.pipe).startswith("Pipeline: zb-v, 4 devices, 8 stages, 4 microbatches")
    trainer.save_model(str(tmp_path / "ours"))
    again = hub().GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), plain.model.parameters(), strict=True))
    predicted, wanted = (each.predict(rows(6)) for each in (trainer, plain))
    assert torch.equal(torch.as_tensor(predicted.predictions), torch.as_tensor(wanted.predictions))


@pytest.mark.parametrize("steps", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_a_llama_with_lora_on_4_devices_is_that_on_one_after_every_step(steps: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    base = llama()
    plain, trainer = both(
        peft.get_peft_model(copy.deepcopy(base), config),
        arguments(tmp_path, max_steps=steps),
        devices=4,
        schedule="zb-v",
    )
    trainer.save_model(str(tmp_path / "ours"))
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    wanted = dict(plain.model.named_parameters())
    assert all(torch.equal(each, wanted[name]) for name, each in again.named_parameters())
    assert any("lora_B" in name and each.any() for name, each in again.named_parameters())


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_a_run_resumes_on_other_devices_with_the_bits_of_one_that_went_on(dropout: float, tmp_path: Path) -> None:
    """The draws of dropout depend on the step."""
    from gapless.hf import PipelineTrainer

    def train(folder: str, devices: int, resume: str | None = None) -> list[dict[str, Tensor]]:
        args = arguments(tmp_path / folder, max_steps=5, save_strategy="steps", save_steps=2)
        return trained(PipelineTrainer, gpt2(dropout), args, resume, devices=devices, pipeline={"intra_op_threads": 1})[
            1
        ]

    wanted = train("whole", 2)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = [train("resumed", 3, checkpoint)]
    if not dropout:
        resumed.append(trained(hub().Trainer, gpt2(), arguments(tmp_path / "one", max_steps=5), checkpoint)[1])
    for found in resumed:
        assert len(found) == 3
        for left, last in zip(found, wanted[2:], strict=True):
            assert all(torch.equal(left[name], last[name]) for name in left)


def test_a_checkpoint_is_no_edit_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving writes into the config, for which the model was traced again after every checkpoint."""
    from gapless.hf import PipelineTrainer

    traces: list[Any] = []

    def traced(*args: Any, **kwargs: Any) -> Trace:
        traces.append(Trace(*args, **kwargs))
        return traces[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(settled, "Trace", traced)
    args = arguments(tmp_path, save_strategy="steps", save_steps=1)
    trained(PipelineTrainer, gpt2(), args, devices=2)
    assert len(traces) == 1


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("way", "bf16"),
    [
        ("smoothed", True),
        *(pytest.param(way, True, marks=pytest.mark.slow) for way in ("a function", "a subclass")),
        *(pytest.param(way, False, marks=pytest.mark.slow) for way in ("smoothed", "a function", "a subclass")),
    ],
)
def test_every_way_to_a_loss_is_trainer_s(way: str, bf16: bool, tmp_path: Path) -> None:
    """In bfloat16 the loss was computed inside autocast, from logits that Trainer turns to float32."""
    args = arguments(
        tmp_path,
        bf16=bf16,
        eval_strategy="steps",
        eval_steps=2,
        label_smoothing_factor=0.1 if way == "smoothed" else 0.0,
    )
    more: dict[str, Any] = {"compute_loss_func": summed} if way == "a function" else {}
    both(gpt2(), args, OwnLoss if way == "a subclass" else None, eval_dataset=rows(4), **more)


@pytest.mark.slow
def test_a_model_that_takes_no_number_of_items_is_averaged_over_the_batches(tmp_path: Path) -> None:
    model: Any = gpt2()
    model.accepts_loss_kwargs = False
    both(model, arguments(tmp_path, gradient_accumulation_steps=3))


def test_gradient_checkpointing_is_remat(tmp_path: Path) -> None:
    """transformers 5.23 has renamed it: Trainer switched it on, so all stages recomputed, whatever `remat` said."""
    renamed = hasattr(hub().TrainingArguments, "activation_checkpointing")
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    for remat in (None, "none"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*will be removed in v6")
            _, trainer = both(gpt2(), arguments(tmp_path, **{name: True}), remat=remat)
        assert ("remat stage" in str(trainer.pipe)) == (remat is None)
        assert getattr(trainer.args, name)
        assert not getattr(trainer.model, f"is_{name}")


@pytest.mark.slow
def test_mixed_precision_is_trainer_s(tmp_path: Path) -> None:
    both(gpt2(), arguments(tmp_path, bf16=True, eval_strategy="steps", eval_steps=2), eval_dataset=rows(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "encoder and decoder", "images"])
def test_other_models_are_trained_as_by_trainer(kind: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if kind == "classes":
        model = bert("SequenceClassification", num_labels=3)
        more["data_collator"] = lambda samples: {
            **padded(samples),
            "labels": torch.stack([sample["input_ids"][0] % 3 for sample in samples]),
        }
    elif kind == "images":
        small = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = made("ViTForImageClassification", "ViTConfig", **small, image_size=8, patch_size=4)
        images = [{"pixel_values": torch.randn(3, 8, 8), "labels": number % 2} for number in range(28)]
        more |= {"train_dataset": images, "data_collator": hub().default_data_collator}
    else:
        model = t5()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2)
    both(model, args, eval_dataset=more.get("train_dataset", rows(28))[:6], devices=3, schedule="zb-h1", **more)


def sides() -> list[tuple[Any, dict[str, Any]]]:
    """Both trainers, and what only ours takes."""
    from gapless.hf import PipelineTrainer

    return [(hub().Trainer, {}), (PipelineTrainer, {"devices": 2, "pipeline": {"intra_op_threads": 1}})]


@pytest.mark.slow
def test_the_best_model_comes_back_and_training_stops_early(tmp_path: Path) -> None:
    from tests.hf import on_ranks

    plain, trainer = (on_ranks.stopped_early(kind, tmp_path / kind.__name__, **own) for kind, own in sides())
    assert trainer.state.global_step == plain.state.global_step < 9
    assert all(map(torch.equal, trainer.model.parameters(), plain.model.parameters()))


@pytest.mark.slow
def test_other_losses_loaders_without_a_length_and_models_made_anew_are_trainer_s(tmp_path: Path) -> None:
    from tests.hf import on_ranks

    wanted, found = (on_ranks.other_ways(kind, tmp_path / kind.__name__, **own) for kind, own in sides())
    assert all(map(equal, found, wanted))


def test_several_gpus_are_no_data_parallel(tmp_path: Path) -> None:
    from gapless.hf import PipelineTrainer

    args = arguments(tmp_path)
    args._n_gpu = 2
    trainer = PipelineTrainer(gpt2(), args, devices=2)
    assert trainer._train_batch_size == args.per_device_train_batch_size
    assert args.n_gpu == 2  # the arguments are the user's
    assert trainer._wrap_model(trainer.model).module is trainer.model


def refused(tmp_path: Path, message: str, model: Any = None, **options: Any) -> None:
    from gapless.hf import PipelineTrainer

    args = options.pop("args", None) or arguments(tmp_path)
    with pytest.raises(ConfigError, match=message):
        PipelineTrainer(model or nn.Linear(1, 1), args, **{"devices": 2, **options})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("deepspeed", "ds.json", "deepspeed= distributes training in its own way"),
        ("fsdp", True, "fsdp= distributes training in its own way"),
        ("predict_with_generate", True, "predict_with_generate=True generates token by token"),
        ("torch_compile", True, "torch_compile=True compiles the whole model"),
        ("bf16_full_eval", True, "bf16_full_eval=True moves the model to one device .* under autocast, with bf16=True"),
        ("optim", "adalomo", "optim='adalomo' updates weights inside a backward"),
        ("gradient_accumulation_steps", 1, "gradient_accumulation_steps is 1, and a pipeline needs several"),
    ],
)
def test_what_a_pipeline_can_t_do_is_refused_by_name(name: str, value: Any, message: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    refused(tmp_path, message, args=args)


def test_processes_without_a_group_are_no_single_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, without a GPU and without use_cpu=True, each rank trained alone, and all wrote the same files."""
    args = arguments(tmp_path)
    assert args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused(
        tmp_path, "this is one of 4 processes, but accelerate has made no group of them, .* use_cpu=True", args=args
    )


def test_what_is_said_twice_or_in_the_wrong_place_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "microbatches is 8, but gradient_accumulation_steps is 4", microbatches=8)
    refused(tmp_path, "pipeline= has loss, which PipelineTrainer decides", pipeline={"loss": None})
    refused(tmp_path, "pipeline= has 'timelines', which gapless.Pipeline does not take", pipeline={"timelines": True})
    refused(tmp_path, "pipeline is a list, but it must be a dict", pipeline=["timeline"])
    refused(
        tmp_path, "schedule='2bw' updates weights inside the schedule, but Trainer updates them once", schedule="2bw"
    )
    refused(tmp_path, "devices is 0, but it must be a whole number of at least 1", devices=0)
    refused(tmp_path, "devices= is missing: give how many, as devices=4, or start it with torchrun", devices=None)
    refused(tmp_path, "dp is 2, but this is one process: start it with torchrun, or leave dp= out", dp=2)
    schedule = gapless.make_schedule("1f1b", devices=2, microbatches=4)
    refused(tmp_path, "the schedule is for 4 microbatches and no other number", schedule=schedule)
    args = arguments(tmp_path, gradient_accumulation_steps=1)
    refused(tmp_path, "microbatches is 0, but it must be a whole number of at least 1", args=args, microbatches=0)
    model: Any = nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    refused(tmp_path, "device_map= has spread the model over 2 devices", model)


class TwiceCalled:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return sum(model(**inputs, num_items_in_batch=num_items_in_batch).loss for _ in range(2))


class Changed:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return super().training_step(model, dict(inputs), num_items_in_batch)  # type: ignore[misc]


class ChangedInPlace:
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        inputs["labels"][:, 1] = 5
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]


class Diffusing:
    """The noise that the loss looks for is not that of the inputs, if it is drawn twice."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        noise = torch.randn(*inputs["input_ids"].shape, 8)
        logits = model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]).detach() + noise).logits
        return (logits[..., :8] - noise).pow(2).mean()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwiceCalled, "compute_loss calls the model a second time"),
        (Changed, "training_step got another batch than the one that was fetched"),
        (ChangedInPlace, "or has changed it, and the pipeline has trained on that"),
        (Diffusing, "compute_loss runs twice for a batch, and calls the model with other values the second time"),
    ],
)
def test_a_subclass_that_would_train_on_other_numbers_is_told(kind: type, message: str, tmp_path: Path) -> None:
    from gapless.hf import PipelineTrainer

    with pytest.raises(ConfigError, match=message):
        trained(type("Own", (kind, PipelineTrainer), {}), gpt2(), arguments(tmp_path), devices=2)


def test_a_call_that_was_not_foreseen_runs_alone_and_a_batch_may_be_changed(tmp_path: Path) -> None:
    from gapless.hf import PipelineTrainer

    class Twice(PipelineTrainer):
        def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            super().prediction_step(model, inputs, *given, **named)
            labels = inputs.pop("labels")
            return super().prediction_step(model, {**inputs, "labels": labels}, *given, **named)

    args = arguments(tmp_path, per_device_eval_batch_size=2)
    wanted, found = (kind(gpt2(), args, padded, devices=2).predict(rows(6)) for kind in (PipelineTrainer, Twice))
    assert found.metrics["test_loss"] == wanted.metrics["test_loss"]
    assert torch.equal(torch.as_tensor(found.predictions), torch.as_tensor(wanted.predictions))


def test_without_hugging_face_s_libraries_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gapless.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ConfigError, match=r"accelerate is missing: pip install 'gapless\[hf\]'"):
        importlib.import_module("gapless.hf")
