"""`gapless checkpoint`: what a run has saved, whether it is as it was, and its weights for others."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gapless.checkpoint import Checkpoints
from gapless.pipeline.pipeline import Pipeline
from tests.cli.conftest import Command, Refusal


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    made[2].weight = made[0].weight
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    with Pipeline(tied(), devices=2, microbatches=1, loss=nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        with Checkpoints(folder, pipe, background=False) as checkpoints:
            for metric in (0.5, None):
                pipe.step(torch.ones(4, 4), torch.zeros(4, 4))
                optimizer.step()
                checkpoints.save(optimizer, metric=metric)
    return folder


def test_a_run_is_listed(gapless: Command, run: Path) -> None:
    code, out, err = gapless("checkpoint list", str(run))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "    step  saved                     size  metric  path"
    number = r"\d+(\.\d+)? KiB"
    assert re.fullmatch(
        rf"       1  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  +{number}     0.5  {run}/step-00000001", lines[1]
    )
    assert re.fullmatch(
        rf"       2  \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  +{number}          {run}/step-00000002", lines[2]
    )
    found = json.loads(gapless("checkpoint list --json", str(run)).out)["checkpoints"]
    assert [(each["step"], each["metric"], each["fault"]) for each in found] == [(1, 0.5, ""), (2, None, "")]


def test_every_checkpoint_of_a_run_is_verified_and_a_changed_byte_is_named(
    gapless: Command, run: Path, tmp_path: Path
) -> None:
    code, out, err = gapless("checkpoint verify", str(run))
    assert (code, err) == (0, "")
    assert re.fullmatch(r"(.*/step-0000000\d: correct \(step \d, 23 tensors, 1 file, \d.* KiB\)\n){2}", out)
    code, out, err = gapless("checkpoint verify", str(run / "latest"))  # it was refused, without a word
    assert (code, err) == (0, "")
    assert out.startswith(f"{run / 'latest'}: correct (step 2, ")
    broken = tmp_path / "broken"
    for file in (run / "step-00000002").iterdir():
        broken.mkdir(exist_ok=True)
        data = bytearray(file.read_bytes())
        data[-1] ^= file.suffix == ".safetensors"
        (broken / file.name).write_bytes(data)
    code, out, err = gapless("checkpoint verify", str(broken))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"gapless: .*/broken/shard-00001\S* is damaged: the hash of \S+ does not match\n", err)
    code, out, _ = gapless("checkpoint verify --json", str(broken))
    assert code == 2
    assert json.loads(out)["ok"] is False


def test_weights_are_exported_as_a_file_that_the_plain_model_takes(gapless: Command, run: Path, tmp_path: Path) -> None:
    code, out, err = gapless("checkpoint export", str(run), str(tmp_path / "out.safetensors"))
    assert (code, err) == (0, "")
    assert out.splitlines() == [f"9 tensors, 232 B, of {run}/step-00000002:", f"  {tmp_path}/out.safetensors"]
    model = tied()
    before = model.state_dict()["0.weight"].clone()
    model.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert not torch.equal(model.state_dict()["0.weight"], before)
    code, _, err = gapless("checkpoint export", str(run), str(tmp_path / "out.safetensors"))
    assert (code, err) == (2, f"gapless: {tmp_path}/out.safetensors exists already: export to another name\n")


def test_weights_are_exported_as_a_folder_that_hugging_face_loads(gapless: Command, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    with Pipeline(model, devices=2, microbatches=1) as pipe:
        pipe.save(tmp_path / "step", None)
    for largest, has_index in {"5GB": False, "10kB": True}.items():
        words = ["checkpoint export", str(tmp_path / "step"), str(tmp_path / largest), "--largest", largest]
        assert gapless(*words).code == 0
        assert (tmp_path / largest / "model.safetensors.index.json").exists() == has_index
        found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / largest).state_dict()
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("checkpoint", "the following arguments are required: VERB; `gapless checkpoint --help` shows how"),
        ("checkpoint verify {0}/none", "{0}/none is not a folder"),
        ("checkpoint verify {0}", "{0} has no checkpoints: name a checkpoint, or the folder of a run"),
        ("checkpoint export {1} {0}/x --largest big", "--largest is 'big', but"),
        ("checkpoint export {1} {0}/x --largest 0", "--largest is 0, but it must be a size such as 5GB"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    words: str, message: str, refused: Refusal, tmp_path: Path, run: Path
) -> None:
    assert refused(words.format(tmp_path, run)).startswith(message.format(tmp_path, run))
