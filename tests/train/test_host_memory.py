"""Sizes with a few digits too many: a sentence with the numbers, before anything of that size is made."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from gapless.cli import main
from gapless.errors import ConfigError
from gapless.pipeline.pipeline import Pipeline
from gapless.schedule.recipes import make_schedule
from gapless.train import host_memory
from gapless.train.config.config import read_config
from gapless.train.job import build
from tests.train.configs import CONFIG, GPT, write

BILLION = 1_000_000_000
MUCH = 1000 * BILLION  # more than any machine has room for


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # Each of them was killed by the system, or ran until somebody lost patience.
        (
            "width = 8",
            f"width = {BILLION}",
            r"model: gpt failed with RuntimeError: Storage size calculation overflowed",
        ),
        ("width = 8", "width = 1000000", r"model: gpt .* has 87.* TiB of weights, and their gradients take as much "),
        ("width = 8", f"width = 8, vocab = {MUCH}", r"has 61.* TiB of weights.* of memory: make it smaller"),
        ("context = 8 }\n\n[data]", f"context = {MUCH} }}\n\n[data]", r"has 29.* TiB of weights"),
        ("depth = 2", f"depth = {BILLION}", r"depth is 1,000,000,000, but gpt takes up to 10,000 layers"),
        ("minibatch = 4", f"minibatch = {MUCH}", r"a minibatch of 1,000,000,000,000 samples of 8 tokens takes 1.* TiB"),
        ("= { context = 8 }\n\n[pipe", f"= {{ context = {MUCH} }}\n\n[pipe", r"4 samples of 1,000,000,000,000 tokens"),
        ("microbatches = 2", f"microbatches = {BILLION}", r"samples can't be cut into 1000000000 microbatches"),
        ('["cpu", "cpu"]', f"{BILLION}", r"devices is 1,000,000,000, but a process has at most 4,096"),
        (
            "microbatches = 2",
            f'microbatches = 2\nschedule = "interleaved"\nstages_per_device = {BILLION}',
            r"that would be about 12,000,000,000 actions; a schedule has up to 20,000,000",
        ),
    ],
)
def test_a_size_that_no_machine_has_room_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    assert main(["train", str(write(tmp_path, (old, new), text=GPT))]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error), error


def test_planning_a_config_has_the_same_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write(tmp_path, ("width = 8", "width = 1000000"), text=GPT))
    assert main(["plan", config]) == 2
    assert "TiB of weights" in capsys.readouterr().err


def test_a_microbatch_whose_activations_fill_the_memory_is_refused(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, text=GPT))
    sketch = host_memory.sketched(config, {})
    host_memory.check_activations(config, sketch, torch.empty(4, 8, dtype=torch.long, device="meta"))
    with pytest.raises(
        ConfigError,
        match=r"a microbatch of 500,000,000,000 samples keeps about [\d.e+]+ TiB for its backward, but this machine "
        r"has [\d.]+ [GT]iB of memory: use more microbatches, a smaller minibatch, or remat",
    ):
        host_memory.check_activations(config, sketch, torch.empty(MUCH, 8, dtype=torch.long, device="meta"))


def test_what_is_kept_for_the_backward_is_about_what_is_counted(tmp_path: Path) -> None:
    """Against autograd's own account: within a factor of 1.5 either way."""
    config = read_config(write(tmp_path, ("width = 8", "width = 64"), text=GPT))
    model = build(config).model
    assert isinstance(model, nn.Module)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(torch.zeros(32, 8, dtype=torch.long))
    sketch = host_memory.sketched(config, {})
    assert sketch is not None
    counted = host_memory.kept_by_layers(sketch, torch.zeros(32, 8, dtype=torch.long, device="meta"))
    assert output.requires_grad
    assert 1 / 1.5 < counted / sum(kept.values()) < 1.5


def test_functions_of_ones_own_are_called_as_they_are(tmp_path: Path) -> None:
    # They may do anything, so they are called once: not on the meta device first.
    config = read_config(write(tmp_path, text=CONFIG))
    assert host_memory.sketched(config, {}) is None


def test_the_host_has_some_memory() -> None:
    assert 2**28 < host_memory.memory_of_the_host() < 2**60


def test_a_pipeline_and_a_schedule_have_limits_too() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ConfigError, match="devices is 1,000,000,000, but a process has at most 4,096"):
        Pipeline(layers, devices=BILLION, microbatches=2, loss=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="that would be about 6,000,000,000 actions"):
        Pipeline(layers, devices=2, microbatches=BILLION, loss=nn.functional.mse_loss)
    with pytest.raises(ConfigError, match="that would be about 16,000,000,000 actions"):
        make_schedule("2bw", devices=2, microbatches=4, minibatches=BILLION)
