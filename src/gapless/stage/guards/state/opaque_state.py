"""Objects whose state is in no attribute, list or dict: how it is read, and how it is put back if it can be.

put back    generators of random numbers, arrays and other memory, text in memory, files that are read, variables of
            a context or of a thread
told        iterators, queues: that they have moved is seen, and no more
unknown     generators, and iterators that keep to themselves where they stand
caches      of functools: what is in them may stay, unless the function behind has changed something
"""

import array
import contextlib
import contextvars
import ctypes
import functools
import io
import itertools
import pickle
import queue
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

MOST = 4096  # entries or bytes of what is looked at in every forward; of what has more, only how many
Read = Callable[[Any], Any]
_UNSET = object()
_PASSED_ON = (map, filter, zip, enumerate, type(iter(int, 1)))  # which move what they were made of
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_MEMORY = (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)


class Access(NamedTuple):
    """How the state of such an object is read, and written, if it can be; at a `glance` in every forward, if that is
    cheap.
    """

    read: Read
    write: Callable[[Any, Any], None] | None = None
    glance: Read | None = None
    between_stages: bool = False  # whether a change is looked for where two stages hold it


class Opaque:
    """One of them."""

    __slots__ = ("access", "value")

    def __init__(self, value: Any, access: Access) -> None:
        self.value, self.access = value, access

    def read(self) -> Any:
        return self.access.read(self.value)

    @property
    def is_unknown(self) -> bool:
        """Whether nobody can tell whether it has moved."""
        return self.access is _UNKNOWN

    @property
    def is_cache(self) -> bool:
        return self.access is _CACHE


def opaque(value: Any) -> Opaque | None:
    """The object, if it is one of them."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is None:
        return None  # it has ended
    if isinstance(value, _ALL):
        return next(Opaque(value, access) for kinds, access in _KINDS if isinstance(value, kinds))
    home, name = type(value).__module__, type(value).__name__
    if home == "numpy" and name == "ndarray":
        return Opaque(value, _ARRAY)
    if home.startswith("numpy.random") and hasattr(value, "bit_generator"):
        return Opaque(value, _NUMPY)
    if isinstance(value, io.IOBase):
        return Opaque(value, _FILE) if _is_read(value) else None
    if not hasattr(type(value), "__next__") or isinstance(value, _PASSED_ON) or hasattr(value, "__dict__"):
        return None
    return Opaque(value, _ITERATOR if hasattr(value, "__length_hint__") else _UNKNOWN)


def _is_read(file: io.IOBase) -> bool:
    """What is written to may be a log."""
    return not file.closed and file.readable() and not file.writable() and file.seekable()


def _write_array(value: Any, content: bytes) -> None:
    del value[:]
    value.frombytes(content)


def _write_memory(value: Any, content: bytes) -> None:
    ctypes.memmove(ctypes.addressof(value), content, len(content))


def _write_view(value: memoryview, content: bytes) -> None:
    if not value.readonly:
        value.cast("B")[:] = content


def _write_text(value: Any, content: tuple[Any, int]) -> None:
    value.seek(0)
    value.truncate()
    value.write(content[0])
    value.seek(content[1])


def _write_local(value: threading.local, content: dict[str, Any]) -> None:
    vars(value).clear()
    vars(value).update(content)


def _write_numpy(value: Any, content: bytes) -> None:
    value.bit_generator.state = pickle.loads(content)


def _read_variable(value: contextvars.ContextVar[Any]) -> list[Any]:
    return [value.get(_UNSET)]


def _write_variable(value: contextvars.ContextVar[Any], content: list[Any]) -> None:
    if content[0] is not _UNSET:
        value.set(content[0])
        return
    with contextlib.suppress(LookupError):  # it has no default
        value.set(contextvars.Context().run(value.get))


def _write_elements(value: Any, content: Any) -> None:
    value[...] = content


def _bytes_of(value: Any) -> bytes | None:
    size = value.nbytes if hasattr(value, "nbytes") else len(value) * value.itemsize
    return value.tobytes() if size <= MOST else None


def _misses(value: Any) -> int:
    return value.cache_info().misses  # type: ignore[no-any-return]


def _position(value: Any) -> Any:
    try:
        return value.tell()
    except (OSError, ValueError):  # it is being iterated, or was closed meanwhile
        return None


def _seek(value: Any, content: Any) -> None:
    if content is not None:
        value.seek(content)


_ARRAY = Access(lambda value: value.copy(), _write_elements, _bytes_of, True)
_NUMPY = Access(lambda value: pickle.dumps(value.bit_generator.state), _write_numpy)
_FILE = Access(_position, _seek, _position)
_ITERATOR = Access(lambda value: value.__length_hint__(), None, lambda value: value.__length_hint__(), True)
_UNKNOWN = Access(lambda value: None)
_CACHE = Access(_misses)
_KINDS: tuple[tuple[Any, Access], ...] = (
    (random.Random, Access(lambda value: value.getstate(), lambda value, content: value.setstate(content))),
    (array.array, Access(lambda value: value.tobytes(), _write_array, _bytes_of, True)),
    (memoryview, Access(lambda value: value.tobytes(), _write_view, _bytes_of, True)),
    (_MEMORY, Access(bytes, _write_memory, lambda value: bytes(value) if ctypes.sizeof(value) <= MOST else None, True)),
    ((io.StringIO, io.BytesIO), Access(lambda value: (value.getvalue(), value.tell()), _write_text, _position)),
    (queue.Queue, Access(lambda value: [*value.queue.copy()], None, lambda value: [*value.queue.copy()])),
    (queue.SimpleQueue, Access(lambda value: value.qsize(), None, lambda value: value.qsize())),
    (threading.local, Access(lambda value: dict(vars(value)), _write_local, lambda value: [*vars(value).items()])),
    (contextvars.ContextVar, Access(_read_variable, _write_variable, _read_variable)),
    (functools._lru_cache_wrapper, _CACHE),
    ((itertools.count, itertools.repeat), Access(repr, None, repr, True)),
    (_GENERATORS, _UNKNOWN),
)
_ALL = tuple(kind for kinds, _ in _KINDS for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
