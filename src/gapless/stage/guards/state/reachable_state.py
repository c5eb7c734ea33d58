"""What layers and losses can reach, and what of it can change.

    held      by attributes, slots, lists and dicts, closures, defaults, bound methods, partials, and whatever else in C
              refers to it
    around    by their code: the functions of their classes, hooks, global variables that these name, attributes of
              classes. What is held as well comes first

Not followed: objects that several threads may use (with a lock in them), those of torch and of gapless, and those of
Python's library that are no state of a layer, such as loggers. Code of installed packages is taken to keep its state in
objects.
"""

import dis
import functools
import gc
import os
import sys
import sysconfig
import threading
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .opaque_state import Opaque, opaque
from .state_notes import LISTS, Fields, Variable, content_of, slots_of

Path = tuple[Any, str]  # something, and how it is called
Met = Callable[[nn.Module], bool]
LIBRARIES = frozenset(sys.stdlib_module_names - {"__main__"}) | {"torch", "gapless"}
_SIMPLE = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size))
_THREADING = ("_thread", "threading")
_NO_STATE = frozenset(
    (
        *("torch", "gapless", "logging", "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "socket"),
        *("subprocess", "selectors", "contextlib", "pathlib", "typing", "inspect", "importlib", "enum", "re", "abc"),
        *("ast", "dis", "io", "os", "traceback", "unittest", "warnings", "dataclasses"),
    )
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HELD = (dict, types.CellType, *LISTS)
_PLAIN = frozenset(_HELD) - {bytearray}  # of these types and no other nothing else is to be known
_BEHIND = (types.BuiltinFunctionType, types.MethodWrapperType, types.MappingProxyType, functools.partial)
_STORES = dis.opmap["STORE_GLOBAL"]
_INSTALLED = tuple(
    os.path.join(folder, "")
    for folder in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(torch.__path__[0]),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))),
    }
)


def named(parts: Iterable[Any]) -> list[Path]:
    """Layers and losses, and the modules in them."""
    found: list[Path] = []
    for part in parts:
        name = type(part).__name__
        inner = part.named_modules() if isinstance(part, nn.Module) else [("", part)]
        found += [(each, f"{name}.{path}" if path else name) for path, each in inner]
    return found


class Walk:
    """All that can be reached from some parts, the nearest first, and `most` of it; with what holds something in it
    that can change, or None. Parts of modules are given too. Other modules are looked into, if they are not to `meet`
    first and that says no: into their buffers and modules as well.
    """

    def __init__(
        self, parts: Iterable[Path], meet: Met | None = None, *, most: int = sys.maxsize, follows: bool = True
    ) -> None:
        """`follows`: `around` will be asked for."""
        self._waiting = deque(parts)
        self._given = {id(value) for value, _ in self._waiting}
        self._around: deque[Path] = deque()
        self._seen = set[Any]()
        self._meet, self._most, self._follows = meet, most, follows

    def held(self) -> Iterator[tuple[Any, Any, str]]:
        """What is held, before anything else."""
        while self._waiting and len(self._seen) < self._most:
            value, path = self._waiting.popleft()
            if type(value) not in _SIMPLE and id(value) not in self._seen:
                self._seen.add(id(value))
                yield from self._visit(value, path)

    def around(self) -> Iterator[tuple[Any, Any, str]]:
        """What else code reaches."""
        while self._around and len(self._seen) < self._most:
            self._waiting.append(self._around.popleft())
            yield from self.held()

    def _visit(self, value: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
        fields: Fields | None
        if type(value) in _PLAIN:
            yield value, value, path
            self._wait(path, content_of(value))
            return
        if isinstance(value, nn.Module):
            if id(value) not in self._given:
                if self._meet is not None and not self._meet(value):
                    return
                self._wait(path, {**value._modules, **value._buffers, "_buffers": value._buffers})
            fields = Fields(value)
            yield value, fields, path
            self._wait(path, fields.read())
            if self._follows:
                self._around.append((type(value), type(value).__name__))
                for hooks in _HOOKS:
                    self._around += [(hook, f"{path}.{hooks}") for hook in value.__dict__.get(hooks, {}).values()]
            return
        if isinstance(value, Variable):
            yield value, value, path
            self._wait(path, value.read())
            return
        if isinstance(value, type):
            if self._follows and _is_users(value.__module__):
                self._visit_class(value, path)
            return
        if isinstance(value, types.ModuleType):
            if self._follows and _is_users(value.__name__):
                self._add_variables(value.__dict__, list(value.__dict__), path)
            return
        holder = _holder(value)
        fields = Fields(value) if not isinstance(holder, Opaque) and _has_fields(value) else None
        yield value, fields if holder is None else holder, path
        if fields is not None and holder is not None:
            yield value, fields, path
        if self._follows and isinstance(value, types.FunctionType):
            self._visit_code(value, path)
        elif self._follows and fields is not None:
            self._around.append((type(value), type(value).__name__))
        if fields is not None:
            self._wait(path, fields.read())
        if isinstance(holder, _HELD):
            self._wait(path, content_of(holder))
        self._wait(path, _parts(value))

    def _wait(self, path: str, content: Any) -> None:
        if isinstance(content, dict):
            self._waiting += [(each, f"{path}.{key}") for key, each in content.items() if type(each) not in _SIMPLE]
        else:
            self._waiting += [(each, f"{path}[{n}]") for n, each in enumerate(content) if type(each) not in _SIMPLE]

    def _visit_code(self, function: types.FunctionType, path: str) -> None:
        """The global variables that it names, and attributes of modules in these."""
        code, space = function.__code__, function.__globals__
        if not _is_users_file(code.co_filename):
            return
        names, stored = _names_in(code)
        self._around += [(Variable(space, name), name) for name in stored if self._is_new(space, name)]
        for name in names:
            value = space.get(name)
            if isinstance(value, types.ModuleType):
                if _is_users(value.__name__):
                    self._add_variables(value.__dict__, names, name)
            elif type(value) not in _SIMPLE:
                self._around.append((value, name))

    def _visit_class(self, kind: type, path: str) -> None:
        """Its attributes and methods."""
        self._around += [(base, base.__name__) for base in kind.__bases__ if _is_users(base.__module__)]
        self._add_variables(kind, list(kind.__dict__), path)
        for name, value in list(kind.__dict__.items()):
            for function in (getattr(value, "__func__", value), *(getattr(value, f, None) for f in ("fget", "fset"))):
                if isinstance(function, types.FunctionType):
                    self._around.append((function, f"{path}.{name}"))

    def _add_variables(self, space: Any, names: Iterable[str], path: str) -> None:
        held = space.__dict__ if isinstance(space, type) else space
        for name in names:
            value = held.get(name)
            if name in held and not name.startswith("__") and _is_data(value) and self._is_new(space, name):
                self._around.append((Variable(space, name), f"{path}.{name}"))

    def _is_new(self, space: Any, name: str) -> bool:
        key = id(space), name
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _holder(value: Any) -> Any:
    """What has contents besides attributes."""
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.grad_fn is None and value.layout == torch.strided
        return value if plain and not (value.is_meta or value.is_inference()) else None
    return value if isinstance(value, _HELD) else opaque(value)


def _has_fields(value: Any) -> bool:
    """Whether it has attributes that can change, and is not one of those that are no state of a layer."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        if not attributes and isinstance(value, types.FunctionType):
            return False
        if any(_is_for_threads(each) for each in attributes.values()):
            return False
    elif not slots_of(type(value)):
        return False
    return not isinstance(value, Tensor) and type(value).__module__.partition(".")[0] not in _NO_STATE


def _is_for_threads(value: Any) -> bool:
    return type(value).__module__ in _THREADING and not isinstance(value, threading.local)


def _parts(value: Any) -> Sequence[Any]:
    """What stands behind it."""
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        known = (cell for name, cell in cells if name != "__class__")
        return [*known, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, (tuple, frozenset)):
        return [*value]
    if isinstance(value, defaultdict):
        return (value.default_factory,)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    if isinstance(value, threading.local):
        return [*vars(value).values()]
    kind = type(value)
    if kind.__name__ == "ndarray" and value.dtype == object:
        return [*value.flat]
    in_c = kind.__module__ in ("builtins", "itertools") and not isinstance(value, types.GeneratorType)
    if isinstance(value, _BEHIND) or (in_c and hasattr(kind, "__next__")):
        return [each for each in gc.get_referents(value) if not isinstance(each, (type, types.ModuleType))]
    return ()


def _is_data(value: Any) -> bool:
    return not isinstance(value, (type, types.ModuleType)) and not callable(value) and not hasattr(value, "__get__")


@functools.cache
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in it, and the global variables that it sets."""
    names, stored = {*code.co_names}, set[str]()
    if _STORES in code.co_code[::2]:
        stored = {each.argval for each in dis.get_instructions(code) if each.opcode == _STORES}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, set_there = _names_in(inner)
            names, stored = names | more, stored | set_there
    return frozenset(names), frozenset(stored)


def _is_users_file(name: str) -> bool:
    return not name.startswith((*_INSTALLED, "<frozen"))


@functools.cache
def _is_users(module: str) -> bool:
    """Whether a module is neither Python's nor of an installed package."""
    home = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] not in LIBRARIES and _is_users_file(home)
