"""A file that a user names. The error says which file, and what is wrong: missing, too large, not text, no sense."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gapless.errors import ConfigError, GaplessError, printable
from gapless.units import show_bytes

T = TypeVar("T")


def read_user_file(
    path: str | Path,
    parse: Callable[[str], T],
    what: str,
    form: str,
    *,
    largest: int = 64 * 2**20,
    error: type[GaplessError] = ConfigError,
) -> T:
    """What `parse` makes of the text. `what` it should be and its `form` complete the errors: "a plan", "is JSON"."""
    file, shown = Path(path), printable(str(path)[:200])
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "a pipe or a device"
        raise error(f"{shown} is {kind}, not a file" if file.exists() else f"there is no file {shown}")
    if (size := file.stat().st_size) > largest:
        raise error(f"{shown} has {show_bytes(size)}, but {what} has at most {show_bytes(largest)}")
    try:
        return parse(file.read_text("utf-8"))
    except UnicodeDecodeError:
        raise error(f"{shown} is not text; {what} {form}") from None
    except error as wrong:
        raise error(f"{shown}: {wrong}") from None
