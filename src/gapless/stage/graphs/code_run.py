"""Which Python code a forward runs while it is captured, and what that code asks of the world outside.

A graph repeats what it got: a number from Python's `random` or NumPy, the time, a file. Helpers count, however they are
called, since Python itself tells what runs. What the code reads of its modules is compared in every step.
"""

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, ModuleType
from typing import Any

_SOURCES = re.compile(r"(time|random|datetime)\.|posix\.(urandom|read|stat|listdir)$|_?io\.(open|read)")
_MODULES = ("random", "numpy", "time", "datetime")
_TRUSTED = frozenset(
    ("builtins", "torch", "gapless", "logging", "warnings", "linecache", "tokenize", "threading", "importlib")
)


def is_trusted(module: str | None) -> bool:
    """Code that asks for nothing, or for nothing that it computes with."""
    return (module or "").partition(".")[0] in _TRUSTED


class CodeRun:
    """Looks on while it is entered. `source` is the first thing asked of the outside, for people."""

    def __init__(self) -> None:
        self.source: str | None = None
        self.read: dict[tuple[int, str], Mapping[str, Any]] = {}  # names, and the module that has them
        self._seen: set[CodeType] = set()
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def values(self) -> Iterator[Any]:
        """What that code reads, as it is now."""
        return (names.get(name) for (_, name), names in self.read.items())

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            if frame.f_code not in self._seen:
                self._seen.add(frame.f_code)
                self._note(frame)
        elif event == "c_call" and self.source is None and not is_trusted(frame.f_globals.get("__name__")):
            owner = getattr(called, "__self__", None)
            home = getattr(called, "__module__", None)
            if home is None:
                home = (owner if isinstance(owner, type) else type(owner)).__module__
            if _SOURCES.match(name := f"{home}.{getattr(called, '__name__', '')}"):
                self.source = f"{name} in {frame.f_code.co_name}"

    def _note(self, frame: FrameType) -> None:
        code, names = frame.f_code, frame.f_globals
        if is_trusted(names.get("__name__")):
            return
        closed = [frame.f_locals.get(name) for name in code.co_freevars]
        modules = []
        for name in code.co_names:
            if name in names:
                self.read[id(names), name] = names
                closed.append(names[name])
                if isinstance(names[name], ModuleType) and not is_trusted(names[name].__name__):
                    modules.append(vars(names[name]))
        self.read |= {(id(each), name): each for each in modules for name in code.co_names if name in each}
        asked = (each for each in closed if is_source(each) and not _only_types(each, code.co_names))
        if self.source is None and (found := next(asked, None)) is not None:
            self.source = f"{getattr(found, '__name__', type(found).__name__)} in {code.co_name}"


def _only_types(module: Any, names: Sequence[str]) -> bool:
    """Whether code with these names takes only types from NumPy, as in isinstance(x, np.ndarray)."""
    if not isinstance(module, ModuleType) or module.__name__ != "numpy":
        return False
    found = [getattr(module, name) for name in names if hasattr(module, name)]
    numbers = module.ndarray, module.number
    return bool(found) and all(isinstance(each, type) and issubclass(each, numbers) for each in found)


def is_source(value: Any) -> bool:
    """Whether something differs from call to call for whoever has it."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _MODULES
    made = isinstance(value, random.Random) or isinstance(getattr(value, "__self__", None), random.Random)
    return made or type(value).__module__.startswith("numpy.random")
