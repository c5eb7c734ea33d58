"""The weights of a checkpoint for others: a plain safetensors file, or a folder as Hugging Face's `from_pretrained`
reads it. Shared weights are there under all their names, so that any model of that kind takes the file as it is.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gapless.checkpoint.disk import Disk, aside, make_folders, write_synced
from gapless.checkpoint.pieces import TensorPart, write_file
from gapless.checkpoint.save import folder_of
from gapless.checkpoint.saveable import Opened
from gapless.errors import CheckpointError, printable
from gapless.model.shards import DTYPE_OF, FILE, INDEX

PLAIN = {"format": "pt"}


class Exported(NamedTuple):
    """What was written, and how much."""

    files: tuple[Path, ...]
    tensors: int
    num_bytes: int


def export(checkpoint: Path, to: Path, largest: int, note: Callable[[str], None] = lambda _: None) -> Exported:
    """One file if `to` ends in .safetensors, otherwise a folder with files of at most `largest` bytes each, where a
    single tensor is not larger, and the model's config.json if it had one. What is there already is never replaced.
    """
    opened = Opened(checkpoint, note)
    target = folder_of(to)
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{printable(to)} exists already: export to another name")
    names = {name: opened.entry(tree) for name, tree in (opened.tree("model") or {}).items()}
    stored = {name: opened.manifest.trees["model"][name]["$tensor"] for name, entry in names.items() if entry}
    parts = {
        name: TensorPart(torch.empty(entry.shape, dtype=DTYPE_OF[entry.dtype], device="meta"), (), entry.shape)
        for name, entry in names.items()
        if entry is not None
    }
    disk, hidden = Disk(), target.with_name(aside(target.name))
    make_folders(disk, target.parent)

    def written(path: Path, names: Mapping[str, TensorPart]) -> None:
        write_file(disk, path, names, note, PLAIN, lambda name: opened.tensor(stored[name]))

    try:
        if target.suffix == ".safetensors":
            written(hidden, parts)
            files = [target]
        else:
            disk.make_folder(hidden)
            files = [target / name for name in _as_folder(disk, hidden, parts, largest, written, opened)]
            disk.sync_folder(hidden)
        disk.rename(hidden, target)
        disk.sync_folder(target.parent)
    except BaseException:
        if hidden.is_dir():
            disk.remove(hidden)
        else:
            hidden.unlink(missing_ok=True)
        raise
    return Exported(tuple(files), len(parts), sum(part.num_bytes for part in parts.values()))


def in_shards(parts: Mapping[str, TensorPart], largest: int) -> list[dict[str, TensorPart]]:
    """What goes into one file each: at most so many bytes, unless one tensor has more."""
    shards: list[dict[str, TensorPart]] = []
    room = 0
    for name, part in parts.items():
        if not shards or part.num_bytes > room:
            shards.append({})
            room = largest
        shards[-1][name] = part
        room -= part.num_bytes
    return shards


def index_of(files: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Which tensor is in which file, from the bytes of each."""
    total = sum(size for sizes in files.values() for size in sizes.values())
    homes = {name: file for file, sizes in files.items() for name in sizes}
    return {"metadata": {"total_size": total}, "weight_map": homes}


def _as_folder(
    disk: Disk,
    folder: Path,
    parts: Mapping[str, TensorPart],
    largest: int,
    written: Callable[[Path, Mapping[str, TensorPart]], None],
    opened: Opened,
) -> list[str]:
    shards = in_shards(parts, largest) or [{}]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [FILE]
    for file, shard in zip(names, shards, strict=True):
        written(folder / file, shard)
    texts: dict[str, Any] = {}
    if len(shards) > 1:
        sizes = [{name: part.num_bytes for name, part in shard.items()} for shard in shards]
        texts[INDEX] = index_of(dict(zip(names, sizes, strict=True)))
    if (config := opened.tree("config")) is not None:
        texts["config.json"] = json.loads(config)
    for name, value in texts.items():
        write_synced(disk, folder / name, json.dumps(value, indent=2).encode())
    return [*names, *texts]
