"""The one file that says what a checkpoint is: its step, the names of all that was saved, and where its bytes are, each
piece with its hash. Without torch, so that a checkpoint can be listed and verified at once.

    step-00000050/
      manifest.json                                     format, step, seed, trees of values, pieces, files
      shard-00001-model-00001-of-00001.safetensors      what rank 0 has written: a header, and pieces of tensors
      shard-00002-model-00001-of-00001.safetensors

The manifest begins with the hash of the rest of it. Pieces and headers leave no gap between them, so every byte of a
checkpoint is in some hash.
"""

import errno
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gapless.errors import CheckpointError, printable

VERSION = 1
NAME = "manifest.json"
_FORMAT = "gapless checkpoint"
_FRAME = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"manifest": (.*)\}\n', re.DOTALL)
_NO_FILE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)  # there is no such file, or a link
_LARGEST = 1 << 30
_BLOCK = 4 << 20
Bytes = tuple[int, int, str, str]  # of a file: from where to where, their hash, and what they are
_OF_BYTES = {1: "F8_E4M3 F8_E5M2 BOOL I8 U8", 2: "F16 BF16 I16 U16", 4: "F32 I32 U32", 8: "F64 C64 I64 U64"}
ITEM_BYTES = {name: size for size, names in _OF_BYTES.items() for name in names.split()}


@dataclass(frozen=True)
class PieceEntry:
    """A block of a tensor and where it is: `offsets` and `sizes` in the tensor, `begin` and `end` in the file."""

    file: str
    begin: int
    end: int
    sha256: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, and its pieces, which together are all of it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[PieceEntry, ...]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileEntry:
    """A file: its bytes, and the hash of its header, which has the first `header` of them."""

    size: int
    header: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`facts` say what it is, `trees` are the values that were saved, with the names of tensors in them."""

    facts: Mapping[str, Any]
    trees: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    version: int = VERSION

    @property
    def step(self) -> int:
        step: int = self.facts["step"]
        return step

    @property
    def metric(self) -> float | None:
        found = self.facts.get("metric")
        return None if found is None else float(found["$float"] if isinstance(found, dict) else found)

    @property
    def size(self) -> int:
        """Of all files but this one."""
        return sum(each.size for each in self.files.values())

    def text(self) -> bytes:
        """As it is in its file."""
        body = {
            "format": _FORMAT,
            "version": self.version,
            "facts": self.facts,
            "trees": self.trees,
            "tensors": {name: asdict(each) for name, each in self.tensors.items()},
            "files": {name: asdict(each) for name, each in self.files.items()},
        }
        written = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return b'{"sha256": "%s",\n"manifest": %s}\n' % (hashlib.sha256(written).hexdigest().encode(), written)


def read_manifest(folder: Path) -> Manifest:
    """That of a folder. Whatever is wrong with it is a CheckpointError that names the file."""
    check_inside(folder)
    path = folder / NAME
    shown = printable(path)
    try:
        with open_inside(path) as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        if not folder.exists():
            raise CheckpointError(f"there is no checkpoint {printable(folder)}") from None
        raise CheckpointError(f"{printable(folder)} is not a checkpoint: it has no {NAME}") from None
    except NotADirectoryError:
        raise CheckpointError(
            f"{printable(folder)} is a file, and a checkpoint is a folder: if torch.save wrote a state_dict into "
            "it, use pipe.load_state_dict(torch.load(file))"
        ) from None
    except OSError as error:
        raise unread(path, error) from None
    frame = _FRAME.fullmatch(data)
    if frame is None or hashlib.sha256(frame[2]).hexdigest().encode() != frame[1]:
        raise CheckpointError(f"{shown} is damaged: its hash does not match; load an earlier checkpoint")
    try:
        return _parsed(json.loads(frame[2]), shown)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{shown} can't be understood: {type(error).__name__}: {error}") from None


def _parsed(body: Any, shown: str) -> Manifest:
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']!r:.40}")
    if type(body["version"]) is not int or body["version"] < 1:
        raise ValueError(f"version {body['version']!r:.40}")
    if body["version"] > VERSION:
        raise CheckpointError(
            f"{shown} has format {body['version']}, but this gapless reads only up to {VERSION}: use a newer gapless"
        )
    tensors = {
        name: TensorEntry(each["dtype"], _numbers(each["shape"]), tuple(_piece(piece) for piece in each["pieces"]))
        for name, each in body["tensors"].items()
    }
    files = {name: FileEntry(**each) for name, each in body["files"].items()}
    made = Manifest(body["facts"], body["trees"], tensors, files, body["version"])
    for wrong in _nonsense(made):
        raise ValueError(wrong)
    return made


def _piece(each: Mapping[str, Any]) -> PieceEntry:
    return PieceEntry(**{**each, "offsets": _numbers(each["offsets"]), "sizes": _numbers(each["sizes"])})


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"sizes {values!r:.40}")
    return tuple(values)


def _nonsense(made: Manifest) -> Iterator[str]:
    """What does not fit together; a reader relies on all of it."""
    if type(made.step) is not int or made.step < 0:
        yield f"step {made.step!r:.40}"
    ends: dict[str, list[tuple[int, int]]] = {name: [(0, each.header)] for name, each in made.files.items()}
    for name, each in made.files.items():
        if Path(name).name != name or not name.endswith(".safetensors") or name.startswith("."):
            yield f"file {name!r:.60}"
        _numbers([each.size, each.header])
    for name, tensor in made.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"{name} of type {tensor.dtype!r:.40}"
            return
        whole, found = math.prod(tensor.shape), 0
        for piece in tensor.pieces:
            count = math.prod(piece.sizes)
            found += count
            fits = len(piece.offsets) == len(piece.sizes) == len(tensor.shape) and all(
                start + size <= of for start, size, of in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
            )
            if not fits or piece.end - piece.begin != count * ITEM_BYTES[tensor.dtype] or piece.file not in ends:
                yield f"{name} has a piece that does not fit"
                return
            ends[piece.file].append((piece.begin, piece.end))
        if found != whole or not tensor.pieces:
            yield f"{name} is not whole"
    for name, pieces in ends.items():
        at = 0
        for begin, end in sorted(pieces):
            if begin != at:
                yield f"{name} has bytes that belong to nothing"
            at = end
        if at != made.files[name].size:
            yield f"{name} has bytes that belong to nothing"


def check_inside(folder: Path) -> None:
    """A link may lead to a checkpoint beside it, as `latest` does, and nowhere else."""
    if folder.is_symlink() and folder.resolve().parent != folder.parent.resolve():
        raise CheckpointError(
            f"{printable(folder)} is a link out of its folder, to {printable(os.readlink(folder))}: give the path of "
            "the checkpoint itself"
        )


def open_inside(path: Path) -> Any:
    """A file of a checkpoint, for reading; never what a link leads to, nor a pipe that would be waited for."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    return os.fdopen(opened, "rb", buffering=0)


class UnreadableError(CheckpointError):
    """Nothing is known of the bytes: they may be sound, so nobody is told to remove them."""


def unread(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a file of a checkpoint can't be read."""
    said = f"{printable(path)} can't be read: {error.strerror}"
    if error.errno in _NO_FILE:
        return CheckpointError(f"{said}; load an earlier checkpoint")
    return UnreadableError(f"{said}; it may be intact, so check its permissions and the disk first")


def faults(folder: Path) -> Iterator[CheckpointError]:
    """All that is wrong with a checkpoint, each in a sentence: every byte is read."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        yield error
        return
    parts: dict[str, list[Bytes]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            parts[piece.file].append((piece.begin, piece.end, piece.sha256, name))
    for file, entry in manifest.files.items():
        path = folder / file
        try:
            yield from map(CheckpointError, _damage(path, entry, sorted(parts[file])))
        except FileNotFoundError:
            yield CheckpointError(f"{printable(path)} is missing")
        except OSError as error:
            yield unread(path, error)


def check_files(folder: Path, manifest: Manifest) -> None:
    """They are there, with their sizes and headers; what is in them is compared when it is read."""
    for name, entry in manifest.files.items():
        try:
            for fault in _damage(folder / name, entry):
                raise CheckpointError(f"{fault}; load an earlier checkpoint")
        except OSError as error:
            raise unread(folder / name, error) from None


def _damage(path: Path, entry: FileEntry, parts: Sequence[Bytes] = ()) -> Iterator[str]:
    """What is wrong with a file: its size, its header, and these parts of it, which follow the header in this order."""
    shown = printable(path)
    with open_inside(path) as file:
        if (size := os.fstat(file.fileno()).st_size) != entry.size:
            yield f"{shown} has {size:,} bytes, and should have {entry.size:,}"
            return
        for begin, end, expected, what in ((0, entry.header, entry.sha256, "its header"), *parts):
            if _hash(file, end - begin) != expected:
                yield f"{shown} is damaged: the hash of {printable(what)} does not match"


def _hash(file: Any, size: int) -> str:
    made = hashlib.sha256()
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        made.update(block)
        size -= len(block)
    return made.hexdigest()
