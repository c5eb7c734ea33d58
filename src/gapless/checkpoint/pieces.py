"""Tensors as blocks of bytes: what of each is here, and how it goes into a safetensors file and comes back.

Files are those of torch's distributed checkpoint with its safetensors storage: its reader takes them, and so does
every tool that reads safetensors. Here they are written piece by piece, hashed on the way and synced, which torch's
writer can't; it makes the whole file in memory first.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.checkpoint.disk import Disk
from gapless.checkpoint.manifest import ITEM_BYTES, FileEntry, PieceEntry, TensorEntry, open_inside, unread
from gapless.errors import CheckpointError, printable
from gapless.model.shards import DTYPE_OF, DTYPES, is_filled, memory_of

_ALIGNED = 8


class TensorPart(NamedTuple):
    """What is here of a tensor: all of it, or this rank's block of a DTensor."""

    data: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]  # of the whole tensor

    @property
    def dtype(self) -> str:
        return DTYPES[self.data.dtype]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def piece_of(tensor: Tensor, place: str) -> TensorPart:
    """Refuses by its place in the tree what no safetensors file can hold."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "has no data" if tensor.is_meta else f"is {tensor.dtype}, {tensor.layout}"
        raise CheckpointError(
            f"{place} {kind}, which safetensors files can't hold: convert it to a dense tensor of another type"
        )
    if not hasattr(tensor, "device_mesh"):
        return TensorPart(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    sharded: Any = tensor
    block = _block_of(sharded)
    local: Tensor = sharded.to_local().detach()
    return TensorPart(local, tuple(block.offsets), tuple(tensor.shape))


def _block_of(tensor: Any) -> Any:
    """Which block of a DTensor is here, as torch's own checkpoints have it."""
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    if any(each.is_partial() for each in tensor.placements):
        raise CheckpointError("a DTensor with partial sums has no value of its own: redistribute it before saving")
    (item,) = create_default_local_save_plan({"tensor": tensor}, True).items
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def write_file(
    disk: Disk,
    path: Path,
    pieces: Mapping[str, TensorPart],
    note: Callable[[str], None],
    metadata: Mapping[str, str],
    fetch: Callable[[str], Tensor] | None = None,
) -> tuple[FileEntry, dict[str, PieceEntry]]:
    """A synced safetensors file. A tensor on a GPU comes to the CPU when it is its turn; where `fetch` is given, it
    gets the data, and `pieces` need not have any.
    """
    names = sorted(pieces, key=lambda name: (-ITEM_BYTES[pieces[name].dtype], name))
    header = _header({name: pieces[name] for name in names}, metadata)
    at = len(header)
    entries = {}
    file = disk.create(path)
    try:
        disk.write(file, path, memoryview(header))
        for name in names:
            note(f"writing {name}")
            piece = pieces[name]
            found = piece.data if fetch is None else fetch(name)
            near = found.cpu().contiguous().resolve_conj().resolve_neg()
            data = memory_of(near)
            disk.write(file, path, data)
            begin, at = at, at + len(data)
            sizes, made = tuple(piece.data.shape), hashlib.sha256(data).hexdigest()
            entries[name] = PieceEntry(path.name, begin, at, made, piece.offsets, sizes)
        disk.sync(file, path)
    finally:
        disk.close(file)
    return FileEntry(at, len(header), hashlib.sha256(header).hexdigest()), entries


def sharded(pieces: Mapping[str, TensorPart]) -> dict[str, str]:
    """Where pieces belong, as torch's distributed checkpoint notes it in its files."""
    offsets = {name: {"saved_offsets": list(each.offsets)} for name, each in pieces.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def _header(pieces: Mapping[str, TensorPart], metadata: Mapping[str, str]) -> bytes:
    """Of a safetensors file."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, each in pieces.items():
        entries[name] = {"dtype": each.dtype, "shape": list(each.data.shape), "data_offsets": [at, at + each.num_bytes]}
        at += each.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def read_tensor(folder: Path, name: str, entry: TensorEntry, into: Any = None) -> Tensor:
    """A whole tensor, or the block of it that a DTensor like `into` has here. What is read is compared with its
    hash."""
    dtype = DTYPE_OF[entry.dtype]
    if into is None:
        made = torch.empty(entry.shape, dtype=dtype)
        _fill(folder, name, entry, made, (0,) * len(entry.shape))
        return made
    from torch.distributed.tensor import DTensor

    block = _block_of(into)
    local = torch.empty(tuple(block.sizes), dtype=dtype)
    _fill(folder, name, entry, local, tuple(block.offsets))
    near = local.to(into.device)
    whole: Tensor = DTensor.from_local(
        near, into.device_mesh, into.placements, run_check=False, shape=into.size(), stride=into.stride()
    )
    return whole


def _fill(folder: Path, name: str, entry: TensorEntry, made: Tensor, start: Sequence[int]) -> None:
    """The block that begins at `start`, from all pieces that have some of it."""
    for piece in entry.pieces:
        both = [
            (max(a, b), min(a + size, b + wanted))
            for a, size, b, wanted in zip(piece.offsets, piece.sizes, start, made.shape, strict=True)
        ]
        if any(begin >= end for begin, end in both):
            continue
        if piece.offsets == tuple(start) and piece.sizes == tuple(made.shape):
            _read(folder, name, piece, made)
            return
        found = torch.empty(piece.sizes, dtype=made.dtype)
        _read(folder, name, piece, found)
        there = tuple(slice(begin - at, end - at) for (begin, end), at in zip(both, piece.offsets, strict=True))
        here = tuple(slice(begin - at, end - at) for (begin, end), at in zip(both, start, strict=True))
        made[here] = found[there]


def _read(folder: Path, name: str, piece: PieceEntry, made: Tensor) -> None:
    """Into a contiguous tensor, all of it."""
    path = folder / piece.file
    data = memory_of(made)
    try:
        with open_inside(path) as file:
            if not is_filled(data, file, piece.begin):
                raise CheckpointError(f"{printable(path)} is truncated; load an earlier checkpoint")
    except OSError as error:
        raise unread(path, error) from None
    if hashlib.sha256(data).hexdigest() != piece.sha256:
        raise CheckpointError(
            f"{printable(path)} is damaged: the hash of {printable(name)} does not match; load an earlier checkpoint"
        )
