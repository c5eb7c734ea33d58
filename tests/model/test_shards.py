"""Tensors of safetensors files, as the library of that format has written them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from gapless.errors import CheckpointError
from gapless.model.shards import DTYPES, FILE, INDEX, Shards


def is_written(dtype: torch.dtype) -> bool:
    """By the library; that of 2024 has no unsigned numbers of two bytes and more, and no complex ones."""
    try:
        return bool(save({"one": torch.ones(1).to(dtype)}))
    except KeyError:
        return False


TYPES = [each for each in DTYPES if is_written(each)]


def some(seed: int) -> dict[str, Tensor]:
    """Random shapes, among them none and empty ones, of all types that the library writes."""
    rng, made = random.Random(seed), {}
    torch.manual_seed(seed)
    for number in range(rng.randint(1, 12)):
        dtype = rng.choice(TYPES)
        shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        made[f"layer.{number}"] = (torch.randn(shape) * 100).abs().to(dtype)
    return made


def in_several(tensors: dict[str, Tensor], folder: Path) -> None:
    homes = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": homes}))


@pytest.mark.parametrize("seed", range(20))
def test_what_was_written_is_read(seed: int, tmp_path: Path) -> None:
    tensors = some(seed)
    in_several(tensors, tmp_path) if seed % 2 else save_file(tensors, tmp_path / FILE)
    shards = Shards(tmp_path)
    assert set(shards) == set(tensors)
    for name, tensor in tensors.items():
        read = shards[name]
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("seed", range(20))
def test_a_file_that_was_cut_off_is_never_taken_for_whole(seed: int, tmp_path: Path) -> None:
    save_file({"a": torch.randn(50), "b": torch.randn(20)}, path := tmp_path / FILE)
    whole = path.read_bytes()
    path.write_bytes(whole[: random.Random(seed).randrange(len(whole))])
    with pytest.raises(CheckpointError, match=r"model.safetensors (ends too early|is no safetensors file)"):
        Shards(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has neither model.safetensors nor model.safetensors.index.json: save"):
        Shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it has pytorch_model.bin, of another form"):
        Shards(tmp_path)
    in_several({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(4)}, tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"part-1.safetensors is missing, and .*index.json names it"):
        Shards(tmp_path)
    save_file({"other": torch.ones(3)}, tmp_path / "part-1.safetensors")
    with pytest.raises(CheckpointError, match=r"names 1 tensors that are not there, such as b in part-1"):
        Shards(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(CheckpointError, match="which is not beside it"):
        Shards(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="is no index of safetensors files"):
        Shards(tmp_path)
