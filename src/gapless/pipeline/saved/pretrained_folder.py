"""The weights of a model in a folder as Hugging Face's `from_pretrained` reads it: every process writes files of its
own tensors, and none ever has the whole.

    model-00001-of-00003.safetensors ...   of rank 0, then of rank 1, ...
    model.safetensors.index.json           which tensor is in which file
    config.json and the like               by the model's own config

All of it appears at once, under another name until then.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gapless.checkpoint.disk import Disk, write_synced
from gapless.checkpoint.export import PLAIN, in_shards, index_of
from gapless.checkpoint.pieces import TensorPart, piece_of, write_file
from gapless.checkpoint.save import folder_of, met, staged
from gapless.errors import CheckpointError, ConfigError, printable
from gapless.model.shards import FILE, INDEX
from gapless.run.world import Gathering


def save_folder(gathering: Gathering, folder: str | Path, model: Any, held: Mapping[str, Any], largest: int) -> None:
    """All processes call it. `held`: the tensors that this one has; files have at most `largest` bytes, unless one
    tensor has more.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained") or hasattr(model, "peft_config"):
        raise ConfigError(
            f"save_pretrained writes whole models of Hugging Face, and this is a {type(model).__name__}: use "
            "pipe.save, or pipe.state_dict"
        )
    target, disk = folder_of(folder), Disk()
    first: dict[Any, str] = {}  # of a tensor with several names
    for name, tensor in held.items():
        if isinstance(tensor, Tensor):
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            first.setdefault(place if tensor.data_ptr() else name, name)
    with ExitStack() as cleanup:

        def begun() -> tuple[list[str], str]:
            return [*first.values()], (_staged(disk, target, cleanup) if gathering.place == 0 else target).name

        rows = met(gathering, "save", target, begun)
        staging, others = target.with_name(rows[0][1]), {name for names, _ in rows[: gathering.place] for name in names}
        shards: list[dict[str, TensorPart]] = []

        def counted() -> int:
            own = {name: held[name] for name in first.values() if name not in others}
            shards.extend(in_shards(_as_saved(model, own), largest))
            return len(shards)

        counts = met(gathering, "save", target, counted)
        begin = 1 + sum(counts[: gathering.place])
        names = [f"model-{begin + number:05d}-of-{sum(counts):05d}.safetensors" for number in range(len(shards))]
        files = dict(zip(names if sum(counts) > 1 else [FILE], shards, strict=False))

        def written() -> dict[str, dict[str, int]]:
            for name, shard in files.items():
                write_file(disk, staging / name, shard, gathering.note, PLAIN)
            return {file: {name: part.num_bytes for name, part in shard.items()} for file, shard in files.items()}

        sizes = {file: its for row in met(gathering, "save", target, written) for file, its in row.items()}

        def finished() -> None:
            if gathering.place == 0:
                _finish(disk, staging, target, model, sizes)

        met(gathering, "save", target, finished)


def _as_saved(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, TensorPart]:
    """Under the names and in the pieces of the files that transformers writes."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: piece_of(tensor, name) for name, tensor in revert_weight_conversion(model, dict(own)).items()}


def _staged(disk: Disk, folder: Path, cleanup: ExitStack) -> Path:
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CheckpointError(f"{printable(str(folder))} exists already: save to a new folder")
    return staged(disk, folder, cleanup)


def _finish(disk: Disk, staging: Path, folder: Path, model: Any, files: Mapping[str, Mapping[str, int]]) -> None:
    if len(files) > 1:
        write_synced(disk, staging / INDEX, json.dumps(index_of(files), indent=2).encode())
    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(staging)
    if getattr(model, "can_generate", bool)() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(staging)
    disk.sync_folder(staging)
    disk.rename(staging, folder)
    disk.sync_folder(folder.parent)
