"""Disks that fail: one that is full, and one whose machine loses power and with it all that was not synced."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gapless.checkpoint.disk import Disk


class PowerLoss(BaseException):
    """The machine is off: nothing runs after that."""


class CountedDisk(Disk):
    """Calls `fail` before its operation number `at`, which may be cut in the middle: a write has written half."""

    def __init__(self, at: int, fail: Callable[[Path], None]) -> None:
        self.done, self._at, self._fail = 0, at, fail

    def _next(self, path: Path) -> None:
        self.done += 1
        if self.done == self._at + 1:
            self._fail(path)

    def write(self, file: int, path: Path, data: memoryview) -> None:
        if self.done == self._at:
            super().write(file, path, data[: len(data) // 2])
        self._next(path)
        super().write(file, path, data)


def _counted(name: str, place: int) -> Callable[..., Any]:
    def operation(disk: CountedDisk, *args: Any) -> Any:
        disk._next(args[place])
        return getattr(Disk, name)(disk, *args)

    return operation


# Which of its arguments is the path, of each operation.
for _name, _place in {
    "make_folder": 0, "create": 0, "sync": 1, "sync_folder": 0, "rename": 1, "exchange": 1, "link": 0, "remove": 0
}.items():  # fmt: skip
    setattr(CountedDisk, _name, _counted(_name, _place))


def full(number: int) -> Callable[[Path], None]:
    """What a full or broken disk says."""

    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    return fail


ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


class _File:
    def __init__(self, data: bytes = b"", synced: bytes = b"") -> None:
        self.data, self.synced = data, synced


class _Link:
    def __init__(self, to: str) -> None:
        self.to = to


class _Folder:
    def __init__(self) -> None:
        self.names: dict[str, _Node] = {}
        self.synced: dict[str, _Node] = {}


_Node = _File | _Folder | _Link


class LossyDisk(CountedDisk):
    """Knows of everything below `root` what is on the disk and what is only on its way there. `syncs=False` is a disk
    that says it has synced and has not.
    """

    def __init__(self, root: Path, at: int, *, syncs: bool = True) -> None:
        super().__init__(at, self._off)
        self._root, self._syncs = root, syncs
        self._top = _known(root)
        self._open: dict[int, _File] = {}

    def _off(self, path: Path) -> None:
        raise PowerLoss(f"at {path}")

    def _at_path(self, path: Path) -> _Folder:
        node: _Node = self._top
        for name in path.relative_to(self._root).parts:
            assert isinstance(node, _Folder)
            node = node.names[name]
        assert isinstance(node, _Folder)
        return node

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._at_path(path.parent).names[path.name] = _Folder()

    def create(self, path: Path) -> int:
        opened = super().create(path)
        self._open[opened] = _File()
        self._at_path(path.parent).names[path.name] = self._open[opened]
        return opened

    def write(self, file: int, path: Path, data: memoryview) -> None:
        super().write(file, path, data)
        self._open[file].data += bytes(data)

    def sync(self, file: int, path: Path) -> None:
        super().sync(file, path)
        if self._syncs:
            self._open[file].synced = self._open[file].data

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        if self._syncs and path.is_relative_to(self._root):
            folder = self._at_path(path)
            folder.synced = dict(folder.names)

    def rename(self, path: Path, to: Path) -> None:
        super().rename(path, to)
        self._at_path(to.parent).names[to.name] = self._at_path(path.parent).names.pop(path.name)

    def exchange(self, path: Path, other: Path) -> None:
        super().exchange(path, other)
        one, two = self._at_path(path.parent).names, self._at_path(other.parent).names
        one[path.name], two[other.name] = two[other.name], one[path.name]

    def link(self, path: Path, to: str) -> bool:
        made = super().link(path, to)
        self._at_path(path.parent).names[path.name] = _Link(to)
        return made

    def remove(self, path: Path) -> None:
        super().remove(path)
        del self._at_path(path.parent).names[path.name]

    def left(self, folder: Path, chosen: random.Random | None, *, names: bool = False) -> None:
        """Writes into an empty folder what is there when the machine is on again: only what was synced, or, for each
        folder and each file by chance, what was on its way. With `names` all names have arrived, and no data.
        """

        def arrived(node: _Node, path: Path) -> None:
            if isinstance(node, _Link):
                path.symlink_to(node.to)
            elif isinstance(node, _File):
                late = chosen is not None and chosen.random() < 0.5
                rest = node.data[len(node.synced) :]
                path.write_bytes(node.synced + (rest[: chosen.randint(0, len(rest))] if late and chosen else b""))
            else:
                path.mkdir(exist_ok=True)
                late = names or (chosen is not None and chosen.random() < 0.5)
                for name, each in (node.names if late else node.synced).items():
                    arrived(each, path / name)

        arrived(self._top, folder)


def _known(path: Path) -> _Folder:
    """What is there already is on the disk."""
    folder = _Folder()
    for entry in path.iterdir():
        node: _Node
        if entry.is_symlink():
            node = _Link(os.readlink(entry))
        elif entry.is_dir():
            node = _known(entry)
        else:
            node = _File(entry.read_bytes(), entry.read_bytes())
        folder.names[entry.name] = node
    folder.synced = dict(folder.names)
    return folder
