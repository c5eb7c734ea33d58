"""A save, from what is in memory to a checkpoint that is there, whole.

    all ranks     meet: what each has of every tensor, and whether all can        one rank of those that have it writes
    each rank     its file, hashed and synced, in a folder that is called otherwise
    all ranks     meet: all files are there
    first rank    manifest, synced; the folder, synced; renamed; the folder above, synced
    all ranks     meet: it is there

What fails on one rank fails on all, the folder goes, and an earlier checkpoint is as it was.
"""

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gapless._version import __version__
from gapless.checkpoint.contents import Contents
from gapless.checkpoint.disk import Disk, HeldFolder, aside, make_folders, remove_leftovers, write_synced
from gapless.checkpoint.manifest import ITEM_BYTES, NAME, FileEntry, Manifest, PieceEntry, TensorEntry
from gapless.checkpoint.pieces import TensorPart, sharded, write_file
from gapless.checkpoint.tree import merged
from gapless.errors import CheckpointError, GaplessError, printable
from gapless.run.world import Gathering

_SMALL = 1 << 16  # bytes; what is smaller is written by the first rank that has it
_FILE = "shard-{:05d}-model-00001-of-00001.safetensors"
T = TypeVar("T")
Offer = tuple[str, Sequence[int], Sequence[int], Sequence[int], bool]  # type, shape, offsets, sizes, of the first only


@dataclass
class SaveUnderWay:
    """What is left to do of a save. It may be done in another thread.

    staging  where it is written, and `folder`, what that will be
    cleanup  what was written goes, unless it is a checkpoint already, and nobody holds it any more
    parts    that this rank writes
    """

    disk: Disk
    gathering: Gathering
    folder: Path
    staging: Path
    cleanup: ExitStack
    parts: Mapping[str, TensorPart]
    manifest: Manifest
    then: Callable[[Manifest], None]

    def finish(self) -> None:
        """When it returns, the checkpoint is there for every rank; when it raises, it does so on every rank."""
        with self.cleanup:
            rows = met(self.gathering, "save", self.folder, self._write)
            met(self.gathering, "save", self.folder, partial(self._appear, rows))

    def _write(self) -> dict[str, Any]:
        """This rank's file."""
        if not self.parts:
            return {}
        name = _FILE.format(self.gathering.place + 1)
        self.gathering.note("saving a checkpoint")
        try:
            file, pieces = write_file(
                self.disk, self.staging / name, self.parts, self.gathering.note, sharded(self.parts)
            )
        except FileNotFoundError as error:
            raise (CheckpointError(not_shared(self.folder)) if self.gathering.place else error) from None
        return {"file": [name, vars(file)], "pieces": {key: vars(each) for key, each in pieces.items()}}

    def _appear(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if self.gathering.place != 0:
            return
        disk, folder, staging = self.disk, self.folder, self.staging
        manifest = _with_files(self.manifest, rows)
        write_synced(disk, staging / NAME, manifest.text())
        disk.sync_folder(staging)
        disk.sync_folder(folder.parent)
        if folder.is_dir() and any(folder.iterdir()):
            _exchange(disk, staging, folder)
            disk.sync_folder(folder.parent)
            disk.remove(staging)  # which is the old one
        else:
            disk.rename(staging, folder)
            disk.sync_folder(folder.parent)
        self.then(manifest)


def begin(
    disk: Disk,
    gathering: Gathering,
    folder: Path,
    contents: Callable[[], Contents],
    then: Callable[[Manifest], None] = lambda _: None,
) -> SaveUnderWay:
    """All ranks can save, and agree on what. `then` is called by the first rank when the checkpoint is there."""
    own, cleanup = Contents({}), ExitStack()

    def offered() -> dict[str, Any]:
        nonlocal own
        own = contents()
        offers = {
            name: [part.dtype, part.shape, part.offsets, part.data.shape, name in own.of_first]
            for name, part in own.parts.items()
        }
        staging = _staged(disk, folder, cleanup) if gathering.place == 0 else folder
        return {"facts": own.facts, "trees": own.trees, "offers": offers, "staging": staging.name}

    with cleanup:
        rows = met(gathering, "save", folder, offered, lambda: own.same)
        owners = [f"rank {rank}" for rank in gathering.ranks]
        facts = {
            **merged([row["facts"] for row in rows], owners),
            "gapless": __version__,
            "torch": str(torch.__version__),
            "time": time.time(),
            "processes": len(rows),
        }
        tensors, mine = _shared_out([row["offers"] for row in rows], gathering.place, owners)
        manifest = Manifest(facts, merged([row["trees"] for row in rows], owners), tensors, {})
        parts = {name: own.parts[name] for name in mine}
        staging = folder.with_name(rows[0]["staging"])
        return SaveUnderWay(disk, gathering, folder, staging, cleanup.pop_all(), parts, manifest, then)


def met(
    gathering: Gathering, doing: str, folder: Path, make: Callable[[], T], same: Callable[[], Mapping[str, Any]] = dict
) -> list[T]:
    """What `make` returns on each rank, when all are well and have the `same`; otherwise all of them raise."""
    own, fault = None, None
    try:
        own = make()
    except Exception as error:
        fault = error
    words = "" if fault is None else _words(fault, doing, folder)
    rows = gathering.everywhere([words, same(), own])
    if isinstance(fault, OSError | GaplessError) and not isinstance(fault, CheckpointError):
        raise CheckpointError(words) from (fault if isinstance(fault, OSError) else None)
    if fault is not None:  # the user's own, or one that knows its guard
        raise fault
    for rank, (told, _, _) in zip(gathering.ranks, rows, strict=True):
        if told:
            raise CheckpointError(f"rank {rank} can't {doing}: {told}")
    merged([each for _, each, _ in rows], [f"rank {rank}" for rank in gathering.ranks])
    return [each for _, _, each in rows]


def _words(fault: Exception, doing: str, folder: Path) -> str:
    if isinstance(fault, GaplessError):
        return str(fault)
    if not isinstance(fault, OSError):
        return f"{type(fault).__name__}: {fault}"
    path = printable(fault.filename or folder)
    kept = "; an earlier checkpoint is as it was" if doing == "save" else ""
    return f"can't {doing} {printable(folder)}: {path}: {fault.strerror or fault}{kept}"


def not_shared(folder: Path) -> str:
    """What a rank says that does not see what the first one has made."""
    return (
        f"{printable(folder.absolute())} on {socket.gethostname()} is not the folder that the first rank has: "
        "save to a folder that all ranks share, such as one on a network file system"
    )


def folder_of(path: str | Path) -> Path:
    """As the user has written it, from the root."""
    folder = Path(os.path.abspath(path))
    if not folder.name:
        raise CheckpointError(f"{printable(path)!r} is not a valid name for a folder")
    return folder


def _staged(disk: Disk, folder: Path, cleanup: ExitStack) -> Path:
    """After what may be replaced was looked at."""
    if folder.is_symlink():
        raise CheckpointError(f"{printable(folder)} is a link: save to another name, or to its target")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{printable(folder)} is a file: save to another name")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NAME).is_file():
        raise CheckpointError(
            f"{printable(folder)} has other files in it, and is not a checkpoint: save to a new folder, such as "
            f"{printable(folder / 'checkpoint')}"
        )
    return staged(disk, folder, cleanup)


def staged(disk: Disk, folder: Path, cleanup: ExitStack) -> Path:
    """A folder beside it, which this process holds, and which goes unless it is renamed."""
    make_folders(disk, folder.parent)
    remove_leftovers(disk, folder.parent, folder.name)
    staging = folder.with_name(aside(folder.name))
    disk.make_folder(staging)
    cleanup.enter_context(HeldFolder(staging))
    cleanup.callback(remove_if_there, disk, staging)
    return staging


def _shared_out(
    offers: Sequence[Mapping[str, Offer]], place: int, owners: Sequence[str]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """All tensors, as yet without pieces, and the names of those that this rank writes. Replicas have the same, so each
    writes its share.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], str]] = {}
    have: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, each in enumerate(offers):
        for name, (dtype, shape, offsets, block, of_first) in each.items():
            known = tensors.setdefault(name, (dtype, tuple(shape), owners[rank]))
            if known[:2] != (dtype, tuple(shape)):
                raise CheckpointError(
                    f"{name} is {known[0]} {known[1]} on {known[2]} and {dtype} {tuple(shape)} on {owners[rank]}: "
                    "make the same model and optimizer on all ranks"
                )
            if 0 in block and 0 not in shape:
                continue  # a rank without a part of it
            key = name, tuple(offsets)
            if key not in have or not of_first:
                have.setdefault(key, []).append(rank)
            sizes[key] = math.prod(block) * ITEM_BYTES[dtype]
    load, mine = [0] * len(offers), []
    for key, ranks in have.items():
        writes = ranks[0] if sizes[key] < _SMALL else min(ranks, key=lambda rank: load[rank])
        load[writes] += sizes[key]
        if writes == place:
            mine.append(key[0])
    return {name: TensorEntry(dtype, shape, ()) for name, (dtype, shape, _) in tensors.items()}, mine


def _with_files(manifest: Manifest, rows: Iterable[Mapping[str, Any]]) -> Manifest:
    files: dict[str, FileEntry] = {}
    pieces: dict[str, list[PieceEntry]] = {name: [] for name in manifest.tensors}
    for row in rows:
        if row:
            name, entry = row["file"]
            files[name] = FileEntry(**entry)
            for key, each in row["pieces"].items():
                pieces[key].append(PieceEntry(**each))
    tensors = {
        name: TensorEntry(each.dtype, each.shape, tuple(pieces[name])) for name, each in manifest.tensors.items()
    }
    return Manifest(manifest.facts, manifest.trees, tensors, files)


def _exchange(disk: Disk, staging: Path, folder: Path) -> None:
    try:
        disk.exchange(staging, folder)
    except OSError as error:
        raise CheckpointError(
            f"{printable(folder)} exists, and this file system can't replace a folder in one step ({error.strerror}): "
            "save to a new folder"
        ) from None


def remove_if_there(disk: Disk, folder: Path) -> None:
    """What can't be removed now is left to the next run."""
    if folder.is_dir():
        with suppress(OSError):
            disk.remove(folder)
