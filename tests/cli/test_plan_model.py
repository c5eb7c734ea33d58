"""`gapless plan --model`: a Hugging Face model from its config alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.plan import read_profile
from tests.cli.conftest import Command, Refusal
from tests.hf.configs import SMALL, folder_of


def test_the_command_tells_sizes_of_stages_and_which_number_of_devices_fits(gapless: Command, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "small", SMALL)
    code, out, _ = gapless(f"plan --model {folder} --length 16 --devices 4 --schedules 1f1b --memory 1MiB")
    assert code == 0
    assert out.startswith("LlamaForCausalLM: 11 layers, ")
    assert "as one pipeline under 1f1b it first fits on 2 such devices" in out.replace("\n", " ")
    assert "nothing was run: times are FLOPs at 400 TFLOP/s with links that cost nothing" in out.replace("\n", " ")
    table = out[out.index("stage  layers") :].splitlines()
    assert table[0].split() == ["stage", "layers", "parameters", "gradients", "optimizer", "activations", "message"]
    assert table[1].split()[:2] == ["0", "model"]


@pytest.mark.slow
def test_figures_are_those_of_the_profile_and_what_fits_nowhere_is_told(gapless: Command, tmp_path: Path) -> None:
    folder, profile = folder_of(tmp_path / "small", SMALL), tmp_path / "profile.json"
    asked = f"plan --model {folder} --length 16 --devices 4 --schedules 1f1b"
    assert gapless(f"{asked} --profile {profile}").code == 0
    found = json.loads(gapless(f"{asked} --json --minibatch 16").out)
    assert sum(stage["parameters"] for stage in found["stages"]) == sum(
        layer.parameters for layer in read_profile(profile).layers
    )
    assert [stage["message"] for stage in found["stages"]][-1] == 0
    code, _, err = gapless(f"{asked} --memory 1MiB --devices 1")
    assert code == 2
    assert err.endswith("as one pipeline under 1f1b it first fits on 2 such devices\n")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "has no config.json: give a folder that save_pretrained wrote"),
        ({"model_type": "nosuch"}, "has model type `nosuch` but Transformers does not recognize"),
        ({"model_type": "nosuch", "auto_map": {"AutoConfig": "own.Own"}}, "has its own model code, which gapless"),
        (SMALL | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantised weights"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "takes pixel_values: give the model"),
        (SMALL | {"architectures": ["LlamaModel"]}, "LlamaModel has no loss: name a class with a head"),
    ],
)
def test_what_has_no_plan_is_said_in_a_sentence(config: Any, words: str, refused: Refusal, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config) if config is not None else tmp_path
    assert words in refused(f"plan --model {folder}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model {} --length 9000", "the length is 9000, but LlamaForCausalLM takes at most 8192 tokens"),
        ("--model {} --dtype flat16", "dtype is 'flat16', but weights have a type such as bfloat16"),
        ("--model {} --flops 12", "--flops is '12', but a speed from 1e+06"),
        ("--model {} --write plan.json", "--write is for plans to train with"),
        ("--model {} profile.json", "needs either PROFILE or --model NAME"),
        ("profile.json --length 12", "--length is for --model"),
        ("", "needs either PROFILE or --model NAME"),
    ],
)
def test_options_that_make_no_sense(options: str, words: str, refused: Refusal, tmp_path: Path) -> None:
    assert words in refused(f"plan {options.format(folder_of(tmp_path, SMALL))}")
