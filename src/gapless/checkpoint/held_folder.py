"""Who is at work in a folder: a lock that ends with its process, however that ends."""

import os
from pathlib import Path

from gapless.checkpoint.disk import Disk, aside, is_aside

try:
    import fcntl
except ImportError:
    raise ImportError("gapless trains on Linux, and in one process on macOS: this system has no file locks") from None


class HeldFolder:
    """A folder that this process alone works in, until it is given back. None of its files tells: a lock is no file."""

    def __init__(self, opened: int) -> None:
        self._opened: int | None = opened

    @classmethod
    def of(cls, path: Path) -> "HeldFolder | None":
        """None where the file system knows no locks; raises BlockingIOError where another one holds it."""
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(opened)
            if isinstance(error, BlockingIOError):
                raise
            return None
        return cls(opened)

    def give_back(self) -> None:
        """Closing ends the lock."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None


def set_aside(disk: Disk, path: Path) -> None:
    """Removes a checkpoint. While it goes it has no name that anybody would load."""
    held, hidden = HeldFolder.of(path), path.with_name(aside(path.name))
    try:
        disk.rename(path, hidden)
        disk.sync_folder(path.parent)
        disk.remove(hidden)
    finally:
        if held is not None:
            held.give_back()


def remove_leftovers(disk: Disk, folder: Path, of: str = "") -> None:
    """What saves have left there that were killed. One that is under way holds its folder."""
    for entry in sorted(folder.iterdir()):
        if is_aside(entry.name, of) and entry.is_symlink():
            entry.unlink()
        elif is_aside(entry.name, of) and entry.is_dir():
            try:
                held = HeldFolder.of(entry)
            except (BlockingIOError, FileNotFoundError):
                continue
            if held is not None:
                try:
                    disk.remove(entry)
                finally:
                    held.give_back()
