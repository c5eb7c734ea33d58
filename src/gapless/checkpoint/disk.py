"""What a save does to the disk, one method each: whoever wants to see what a crash or a full disk leaves derives from
`Disk` and drops, counts or fails its calls. Every error names its path.

Whoever is at work in a folder holds it: a lock that ends with its process, however that ends.

A file is on the disk when it is synced, a name in a folder when the folder is. Until then a crash may leave the one
without the other: a name with nothing behind it, or a rename that never was.
"""

import ctypes
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:
    raise ImportError("gapless trains on Linux, and in one process on macOS: this system has no file locks") from None

_OFTEN = 0.1  # seconds between looks at a folder that is held
_EXCHANGE = 2  # RENAME_EXCHANGE
_AT_CWD = -100
_UNKNOWN = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


class Disk:
    """The real one."""

    def make_folder(self, path: Path) -> None:
        """One folder, in one that is there."""
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """A new file, open for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, path: Path, data: memoryview) -> None:
        """All of it."""
        while data:
            with naming(path):
                data = data[os.write(file, data) :]

    def sync(self, file: int, path: Path) -> None:
        """What was written survives a crash."""
        with naming(path):
            os.fsync(file)

    def close(self, file: int) -> None:
        """What was not synced may be lost."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """The names in it do."""
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with naming(path):
                os.fsync(opened)
        except OSError as error:
            if error.errno not in _UNKNOWN:  # some network file systems have nothing to sync here
                raise
        finally:
            os.close(opened)

    def rename(self, path: Path, to: Path) -> None:
        """In one step; an empty folder or a link of that name is replaced."""
        os.rename(path, to)

    def exchange(self, path: Path, other: Path) -> None:
        """Two folders swap their names in one step."""
        libc: Any = ctypes.CDLL(None, use_errno=True)
        swap: Callable[..., int] | None = getattr(libc, "renameat2", None)
        if swap is None or swap(_AT_CWD, os.fsencode(path), _AT_CWD, os.fsencode(other), _EXCHANGE) != 0:
            number = ctypes.get_errno() if swap is not None else errno.ENOSYS
            raise OSError(number, os.strerror(number), str(other))

    def link(self, path: Path, to: str) -> bool:
        """A symbolic link; False where the file system has none."""
        try:
            os.symlink(to, path)
        except OSError as error:
            if error.errno not in (*_UNKNOWN, errno.EPERM):
                raise
            return False
        return True

    def remove(self, path: Path) -> None:
        """A folder and all that is in it."""
        shutil.rmtree(path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Calls on an open file do not know its name."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_synced(disk: Disk, path: Path, data: bytes) -> None:
    """A whole file."""
    file = disk.create(path)
    try:
        disk.write(file, path, memoryview(data))
        disk.sync(file, path)
    finally:
        disk.close(file)


def replace_file(path: Path, data: bytes) -> None:
    """Whole or not at all, whatever happens to the machine."""
    disk, beside = Disk(), path.with_name(aside(path.name))
    try:
        write_synced(disk, beside, data)
        disk.rename(beside, path)
        disk.sync_folder(path.parent)
    finally:
        beside.unlink(missing_ok=True)


def make_folders(disk: Disk, path: Path) -> None:
    """With those above it, each of which is to survive a crash."""
    if not path.is_dir():
        make_folders(disk, path.parent)
        try:
            disk.make_folder(path)
        except FileExistsError:  # another rank was quicker
            if not path.is_dir():
                raise
        disk.sync_folder(path.parent)


def aside(name: str) -> str:
    """What a checkpoint or file of that name is called while it is written or removed."""
    return f".{name}.{secrets.token_hex(8)}.aside"


def is_aside(name: str, of: str = "") -> bool:
    """Whether it is called so: any, or that of one name."""
    return name.startswith(f".{of}." if of else ".") and name.endswith(".aside")


class HeldFolder:
    """A folder that this process alone works in, until it is closed. None of its files tells: a lock is no file."""

    def __init__(self, path: Path) -> None:
        """Raises BlockingIOError where another one holds it; `locked` is False where the file system knows no locks."""
        self._opened: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.locked = True
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.locked = False
            self.close()
            if isinstance(error, BlockingIOError):
                raise

    def close(self) -> None:
        """Which ends the lock."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def __enter__(self) -> "HeldFolder":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def held_soon(path: Path, within: float) -> HeldFolder:
    """A folder, made if it is not there. A child of a killed process may hold it some seconds longer than that."""
    until = time.monotonic() + within
    while True:
        try:
            path.mkdir(parents=True, exist_ok=True)
            return HeldFolder(path)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_OFTEN)


def set_aside(disk: Disk, path: Path) -> None:
    """Removes a checkpoint. While it goes it has no name that anybody would load."""
    hidden = path.with_name(aside(path.name))
    with HeldFolder(path):
        disk.rename(path, hidden)
        disk.sync_folder(path.parent)
        disk.remove(hidden)


def remove_leftovers(disk: Disk, folder: Path, of: str = "") -> None:
    """What saves have left there that were killed. One that is under way holds its folder."""
    for entry in sorted(folder.iterdir()):
        if is_aside(entry.name, of) and entry.is_symlink():
            entry.unlink()
        elif is_aside(entry.name, of) and entry.is_dir():
            with suppress(BlockingIOError, FileNotFoundError), HeldFolder(entry) as held:
                if held.locked:
                    disk.remove(entry)
