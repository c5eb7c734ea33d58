"""The recipes of docs/huggingface.md, run as printed or as in examples/, against plain loops of the same libraries."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.by_hand import loop
from tests.model.hub import hub

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text("utf-8")


def block(language: str, word: str) -> str:
    """The one of this language that has this word."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (body,) = [each for each in found if word in each]
    return str(body)


def example(name: str, word: str) -> str:
    """A whole script, of which the page shows lines."""
    script = (ROOT / "examples" / name).read_text("utf-8")
    assert set(block("py", word).splitlines()) <= set(script.splitlines())
    return script


def ran(code: str, **more: Any) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch, **more}
    exec(compile(code, "docs/huggingface.md", "exec"), names)
    return names


def plain_loop() -> nn.Module:
    """What both recipes train, without any library: microbatches of a minibatch one after the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    inputs, targets = torch.randn(64, 8), torch.randn(64, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        loop(model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)


def test_accelerate_trains_a_pipeline_with_the_bits_of_a_plain_loop() -> None:
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)  # of other tests in this process
    state.GradientState._reset_state()
    model = ran(example("accelerate_pipeline.py", "accelerator.prepare"))["model"]
    for ours, wanted in zip(model.parameters(), plain_loop().parameters(), strict=True):
        assert torch.equal(ours, wanted)
    from safetensors.torch import load_file

    saved = load_file("accelerated/model.safetensors")
    assert all(torch.equal(each, saved[name]) for name, each in model.state_dict().items())


@pytest.mark.slow
def test_lightning_trains_a_pipeline_with_the_bits_of_a_plain_loop() -> None:
    pytest.importorskip("lightning")
    names = ran(example("lightning_pipeline.py", "def training_step"))
    for ours, wanted in zip(names["model"].parameters(), plain_loop().parameters(), strict=True):
        assert torch.equal(ours, wanted)
    assert {"loss", "val_loss"} <= names["trainer"].callback_metrics.keys()


def test_a_script_changes_by_at_most_four_lines() -> None:
    """The diff that the page shows turns a script for Trainer into the one that the page runs."""
    changes = block("diff", "PipelineTrainer").splitlines()
    assert len(changes) <= 4
    script = block("py", "GPT2Config(")
    for change in changes:
        if change.startswith("+"):
            assert script.count(f"{change[1:]}\n") == 1
        assert change[0] in "+-"


@pytest.mark.slow
def test_the_script_of_the_page_ends_with_the_weights_of_trainer() -> None:
    pytest.importorskip("transformers")
    script = block("py", "GPT2Config(")
    names = ran(script)
    ours = names["model"]
    before = [change[1:] for change in block("diff", "PipelineTrainer").splitlines() if change[0] == "-"]
    after = [change[1:] for change in block("diff", "PipelineTrainer").splitlines() if change[0] == "+"]
    for old, new in zip(before, after, strict=True):
        script = script.replace(new, old)
    assert "gapless" not in script
    wanted = ran(script)["model"]
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), wanted.parameters(), strict=True))
    adapted = ran(block("py", "LoraConfig"), **names, load_base=load_base)
    trained = dict(adapted["trainer"].model.named_parameters())
    assert all(torch.equal(each, trained[name]) for name, each in adapted["model"].named_parameters())


def load_base() -> Any:
    torch.manual_seed(5)
    small = {"vocab_size": 128, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "bos_token_id": 1}
    return hub().LlamaForCausalLM(hub().LlamaConfig(**small, num_attention_heads=2))
