"""Models that no process has whole: read from their files stage by stage, trained, and saved in the same way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gapless
from gapless.errors import CheckpointError, ConfigError
from tests.hf.models import KINDS, batch_of, lora_config, model_of, trained_in_stages, trained_plainly
from tests.model.hub import gpt2, hub
from tests.run.forked import Launch


def loaded(folder: Path, **options: Any) -> gapless.Pipeline:
    hub()
    import gapless.hf

    return gapless.hf.load(folder, **{"devices": 2, "microbatches": 4, "intra_op_threads": 1, **options})


def saved(kind: str, folder: Path) -> Any:
    model = model_of(kind)
    model.save_pretrained(folder, max_shard_size="30KB")
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_files_to_stages_to_files_has_the_bits_of_plain_training(kind: str, tmp_path: Path) -> None:
    plain = trained_plainly(type(saved(kind, tmp_path / "a")).from_pretrained(tmp_path / "a"), kind, steps=2)
    with loaded(tmp_path / "a", schedule="zb-h1") as pipe:
        assert any(each.is_meta for each in pipe.module().parameters())
        trained_in_stages(pipe, kind, steps=2)
        pipe.save_pretrained(tmp_path / "b", max_shard_size=20_000)
        again = type(model_of(kind)).from_pretrained(tmp_path / "b").state_dict()
    assert again.keys() == plain.keys()
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []
    there = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())["weight_map"]
    model = model_of(kind)
    model.save_pretrained(tmp_path / "c")
    assert set(there) == set(load_file(tmp_path / "c" / "model.safetensors"))  # each once, under transformers' names


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_have_a_part_each_and_write_it(ranks: int, tmp_path: Path, launch: Launch) -> None:
    from tests.hf.parts_on_ranks import read_train_and_save

    plain = trained_plainly(type(saved("gpt2", tmp_path / "gpt2")).from_pretrained(tmp_path / "gpt2"), "gpt2", steps=2)
    launch(read_train_and_save, ranks, str(tmp_path), "gpt2", timeout=200)
    again = type(model_of("gpt2")).from_pretrained(tmp_path / "gpt2-trained").state_dict()
    assert [name for name, each in plain.items() if not torch.equal(each, again[name])] == []


@pytest.mark.slow
def test_a_trainer_on_ranks_has_parts_and_resumes_with_another_number(tmp_path: Path, launch: Launch) -> None:
    """The optimizer's state went to parameters that were not there yet, and was lost."""
    from tests.hf.parts_on_ranks import train_parts
    from tests.hf.training import arguments, trained

    (model := gpt2()).save_pretrained(tmp_path / "gpt2")  # type: ignore[operator]
    plain = tmp_path / "plain"
    asked = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 9}
    for steps, ranks, resume in ((2, 2, None), (4, 3, str(plain / "checkpoint-2"))):
        trainer, _ = trained(hub().Trainer, gpt2(), arguments(plain, max_steps=steps, **asked), resume=resume)
        launch(train_parts, ranks, str(tmp_path), str(steps), timeout=200)
        for folder in (f"trained {steps}", f"ours/checkpoint-{steps}"):
            again = type(model).from_pretrained(tmp_path / folder)  # type: ignore[attr-defined]
            assert all(torch.equal(a, b) for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["bert", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gpt2", "llama"))])
def test_adapters_start_and_learn_as_those_of_a_whole_model(kind: str, tmp_path: Path) -> None:
    """PEFT brought them to the meta device, where they lost their values. A classifier learns as a whole."""
    config, base = lora_config(kind), type(saved(kind, tmp_path)).from_pretrained(tmp_path)
    peft = pytest.importorskip("peft")
    torch.manual_seed(7)
    plain = peft.get_peft_model(base, config)
    with loaded(tmp_path, peft_config=config, seed=7, schedule="zb-h1") as pipe:
        model = pipe.module()
        known = dict(plain.named_parameters())
        for name, each in model.named_parameters():
            assert each.requires_grad is known[name].requires_grad
            assert each.is_meta is not each.requires_grad
            assert each.is_meta or torch.equal(each, known[name])
        left = trained_plainly(plain, kind, steps=2)
        trained_in_stages(pipe, kind, steps=2)
        assert [name for name, each in pipe.state_dict().items() if not torch.equal(each, left[name])] == []
        assert any("lora_B" in name and each.any() for name, each in left.items())


def test_adapters_without_values_are_refused(tmp_path: Path) -> None:
    import gapless.hf

    saved("gpt2", tmp_path)
    model = pytest.importorskip("peft").get_peft_model(gapless.hf.empty_model(tmp_path), lora_config("gpt2"))
    with pytest.raises(ConfigError, match=r"lora_A\.default\.weight is an adapter that PEFT has left without values"):
        gapless.Pipeline(model, devices=2, microbatches=4, example=batch_of("gpt2"))


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"init_lora_weights": "olora"}, {"init_lora_weights": "pissa"}])
def test_adapters_that_start_from_weights_are_refused(asked: dict[str, Any], tmp_path: Path) -> None:
    """They read memory that is not there, and the program was gone."""
    saved("gpt2", tmp_path)
    config = pytest.importorskip("peft").LoraConfig(r=2, target_modules=["c_attn"], **asked)
    with pytest.raises(ConfigError, match="without weights only plain LoRA can start, whose adapters do not need them"):
        loaded(tmp_path, peft_config=config)


@pytest.mark.slow
def test_a_trainer_on_ranks_saves_and_resumes_adapters_on_parts_of_a_model(tmp_path: Path, launch: Launch) -> None:
    from tests.hf.parts_on_ranks import train_adapters
    from tests.hf.training import arguments, trained
    from tests.model.hub import llama

    llama().save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    plain, asked = tmp_path / "plain", {"save_strategy": "steps", "save_steps": 2}
    for steps, ranks, resume in ((2, 2, None), (4, 3, str(plain / "checkpoint-2"))):
        base = hub().LlamaForCausalLM.from_pretrained(tmp_path / "llama")
        torch.manual_seed(5)
        model = pytest.importorskip("peft").get_peft_model(base, lora_config())
        trained(hub().Trainer, model, arguments(plain, max_steps=steps, **asked), resume=resume)
        launch(train_adapters, ranks, str(tmp_path), str(steps), timeout=200)
        wanted = load_file(plain / f"checkpoint-{steps}" / "adapter_model.safetensors")
        for folder in (f"adapter {steps}", f"ours/checkpoint-{steps}"):
            again = load_file(tmp_path / folder / "adapter_model.safetensors")
            assert again.keys() == wanted.keys()
            assert all(torch.equal(each, wanted[name]) for name, each in again.items())


def test_types_and_buffers_are_those_of_from_pretrained(tmp_path: Path) -> None:
    model = model_of("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "low")
    import gapless.hf

    for options in ({}, {"dtype": torch.float16}, {"dtype": "float32"}):
        plain = type(model).from_pretrained(tmp_path / "low", **({"dtype": "auto"} | options))
        made = gapless.hf.empty_model(tmp_path / "low", **options)
        assert [(n, p.dtype, p.shape) for n, p in made.named_parameters()] == [
            (n, p.dtype, p.shape) for n, p in plain.named_parameters()
        ]
        for (name, a), (_, b) in zip(made.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(a, b), name


def test_running_statistics_come_from_the_files(tmp_path: Path) -> None:
    """They are no parameters, and kept the values of a new model."""
    config = hub().ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    model, x = hub().ResNetForImageClassification(config).train(), torch.randn(4, 3, 16, 16)
    model(x)
    model.save_pretrained(tmp_path / "a")
    with loaded(tmp_path / "a", microbatches=2, example={"pixel_values": x}) as pipe:
        state = pipe.state_dict()
    assert [name for name, each in model.state_dict().items() if not torch.equal(each, state[name])] == []


def test_a_tied_weight_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    """The name that comes first started anew, without a word."""
    model = model_of("gpt2")
    model.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    with loaded(tmp_path / "a", example=batch_of("gpt2")) as pipe:
        state = pipe.state_dict()
    assert [name for name, each in model.state_dict().items() if not torch.equal(each, state[name])] == []


@pytest.mark.usefixtures("traced_once")
def test_a_new_head_does_not_depend_on_the_number_of_devices(tmp_path: Path) -> None:
    model_of("bert").bert.save_pretrained(tmp_path / "base")
    states = []
    for devices in (1, 3):
        options = {"devices": devices, "example": batch_of("bert")}
        with (
            pytest.warns(
                UserWarning, match="2 weights are missing, and are initialised anew: classifier.weight, classifier.bi"
            ),
            loaded(tmp_path / "base", model_class=hub().BertForSequenceClassification, **options) as pipe,
        ):
            states.append(pipe.state_dict())
    assert all(torch.equal(each, states[1][name]) for name, each in states[0].items())
    assert 0.01 < states[0]["classifier.weight"].std() < 0.03
    assert torch.equal(states[0]["bert.pooler.dense.weight"], model_of("bert").bert.pooler.dense.weight)


def test_without_weights_a_model_starts_anew_and_trains(tmp_path: Path) -> None:
    model_of("llama").config.save_pretrained(tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    (tmp_path / "new" / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with loaded(tmp_path / "new") as pipe:
        trained_in_stages(pipe, "llama", steps=1)
        assert all(each.isfinite().all() for each in pipe.parameters())


def test_other_files_are_refused_before_anything_trains(tmp_path: Path) -> None:
    saved("llama", good := tmp_path / "good")

    def changed(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    file = sorted((cut := changed("cut")).glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="ends too early"):
        loaded(cut)
    config = json.loads(((wide := changed("wide")) / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(CheckpointError, match=r"is for another model: 6 tensors of another shape, .* and 2 more"):
        loaded(wide)
    (other := tmp_path / "other").mkdir()
    shutil.copy(good / "config.json", other)
    save_file({"something.else": torch.ones(3)}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has weights of another model, such as something.else"):
        loaded(other)
    with pytest.raises(ConfigError, match=r"has no config.json"):
        loaded(tmp_path)
    with pytest.raises(ConfigError, match=r"neither a folder here nor a model on the Hub|can't be reached"):
        loaded(tmp_path / "nowhere")
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    ((quantised := changed("quantised")) / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantised weights, which can't be trained"):
        loaded(quantised)


def test_before_its_first_batch_it_has_no_state_to_take_or_give(tmp_path: Path) -> None:
    """What was loaded was gone when the stages were made."""
    model = saved("gpt2", tmp_path / "a")
    with loaded(tmp_path / "a") as pipe:
        for call in (pipe.state_dict, lambda: pipe.load_state_dict(model.state_dict()), pipe.saveable):
            with pytest.raises(
                ConfigError, match=r"is on the meta device, without data: give the pipeline an example="
            ):
                call()


def test_a_save_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path / "a")
    with loaded(tmp_path / "a", example=batch_of("llama")) as pipe:
        monkeypatch.setattr("gapless.checkpoint.disk.Disk.sync_folder", _full)
        with pytest.raises(CheckpointError, match="No space left"):
            pipe.save_pretrained(tmp_path / "b")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
        monkeypatch.undo()
        pipe.save_pretrained(tmp_path / "b")
        with pytest.raises(CheckpointError, match="exists already: save to a new folder"):
            pipe.save_pretrained(tmp_path / "b")


def _full(_: Any, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))
