"""Tensors in safetensors files, each read into memory of its own, and nothing else.

The library of that format maps a file into memory, so that what was read of it counts twice for as long as it is open.

    8 bytes     the length of the header
    header      JSON: for each tensor its type, its shape, its first byte and the one after its last
    the rest    the tensors
"""

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.errors import CheckpointError, printable

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.bool: "BOOL",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
}
DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
_AT_ONCE = 1 << 30  # bytes; the system reads no more than twice as much
_LONGEST_HEADER = 100 << 20


class StoredTensor(NamedTuple):
    """Where a tensor is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Shards(Mapping[str, Tensor]):
    """The tensors of a file, of all files that an index names, or of a folder with either, by their names. What is
    taken out belongs to whoever takes it.
    """

    is_fresh = True

    def __init__(self, path: Path) -> None:
        path = _in_folder(path) if path.is_dir() else path
        if path.suffix != ".json":
            self.stored = _listed(path)
            return
        homes = _homes(path)
        files = {name: _listed(path.parent / name) for name in dict.fromkeys(homes.values())}
        if lacking := [f"{name} in {file}" for name, file in homes.items() if name not in files[file]]:
            raise CheckpointError(
                f"{printable(str(path))} names {len(lacking)} tensors that are not there, such as "
                f"{printable(lacking[0])}: get the files once more"
            )
        self.stored = {name: files[file][name] for name, file in homes.items()}

    def __getitem__(self, name: str) -> Tensor:
        return read(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read(stored: StoredTensor) -> Tensor:
    """In memory of its own."""
    made = torch.empty(stored.shape, dtype=stored.dtype)
    try:
        with open(stored.file, "rb", buffering=0) as file:
            if not is_filled(memory_of(made), file, stored.begin):
                raise _cut_off(stored.file)
    except OSError as error:
        raise _unread(stored.file, error) from None
    return made


def is_filled(memory: memoryview, file: Any, begin: int) -> bool:
    """Reads it from an open file, beginning there. False where that ends too early."""
    file.seek(begin)
    while memory and (count := file.readinto(memory[:_AT_ONCE])):
        memory = memory[count:]
    return not memory


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which must be the CPU's and contiguous."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _in_folder(folder: Path) -> Path:
    for name in (INDEX, FILE):
        if (folder / name).is_file():
            return folder / name
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".safetensors"))
    there = f"; it has {printable(others[0])}, of another form or name" if others else ""
    raise CheckpointError(f"{printable(str(folder))} has neither {FILE} nor {INDEX}{there}: save the model there")


def _homes(index: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"]
        homes = {str(name): str(file) for name, file in found.items()}
    except OSError as error:
        raise _unread(index, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{printable(str(index))} is no index of safetensors files: get it once more") from None
    for file in set(homes.values()):
        if Path(file).name != file:
            raise CheckpointError(f"{printable(str(index))} names {printable(file)}, which is not beside it")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{printable(str(index.parent / file))} is missing, and {index.name} names it")
    return homes


def _listed(path: Path) -> dict[str, StoredTensor]:
    try:
        with open(path, "rb") as file:
            total = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if length > min(_LONGEST_HEADER, total - 8):
                raise _cut_off(path) if total < 8 + length <= _LONGEST_HEADER else _unreadable(path)
            header = json.loads(file.read(length))
        found = {str(name): _entry(path, each, 8 + length) for name, each in header.items() if name != "__metadata__"}
    except OSError as error:
        raise _unread(path, error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unreadable(path) from None
    if any(each.begin + each.num_bytes > total for each in found.values()):
        raise _cut_off(path)
    return found


def _entry(path: Path, entry: Any, start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    made = StoredTensor(path, DTYPE_OF[entry["dtype"]], tuple(map(int, entry["shape"])), start + int(begin))
    if made.num_bytes != end - begin or begin < 0:
        raise ValueError("a tensor of another size")
    return made


def _unread(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{printable(str(path))} can't be read: {error.strerror or error}")


def _unreadable(path: Path) -> CheckpointError:
    return CheckpointError(f"{printable(str(path))} is no safetensors file: get it once more")


def _cut_off(path: Path) -> CheckpointError:
    return CheckpointError(f"{printable(str(path))} ends too early: it was cut off; get it once more")
