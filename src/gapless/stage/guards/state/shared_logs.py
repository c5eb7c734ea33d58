"""Lists and sets to which layers add and from which they never read: logs, of which no number depends.

Whether that is so is read from the code of the layers. Wherever it loads the list, by the names under which they hold
it, the next thing must be to ask for a method that adds. What looks in any other way may be a use.
"""

import dis
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

from .reachable_state import LIBRARIES
from .state_notes import LISTS, Fields, content_of

_ADDS = frozenset(("append", "appendleft", "add"))
_LOADS = frozenset(
    ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
)


def is_log(log: Any, reached: Iterable[tuple[Any, Any, str]]) -> bool:
    """Whether nothing of what is `reached` from layers does more with it than to add to it."""
    codes, names = set[CodeType](), set[str]()
    for value, holder, _ in reached:
        if isinstance(value, FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            names.update(name for name, cell in cells for each in content_of(cell) if each is log)
            names.update(name for name in value.__code__.co_names if value.__globals__.get(name) is log)
            codes.add(value.__code__)
        elif isinstance(value, MethodType):
            codes.add(value.__func__.__code__)
        elif isinstance(holder, Fields):
            names.update(name for name, each in holder.held.items() if each is log)
            codes.update(_methods(type(value)))
        elif isinstance(value, (tuple, dict, *LISTS)) and any(each is log for each in _contents(value)):
            return False  # it has no name there
    return bool(names) and all(_only_adds(code, names) for code in _with_inner(codes))


def _contents(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _methods(kind: type) -> Iterator[CodeType]:
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] not in LIBRARIES:
            for value in vars(each).values():
                for function in (value, getattr(value, "__func__", None), getattr(value, "fget", None)):
                    if isinstance(function, FunctionType):
                        yield function.__code__


def _with_inner(codes: Iterable[CodeType]) -> Iterator[CodeType]:
    waiting = list(codes)
    for code in waiting:  # grows on the way
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield code


def _only_adds(code: CodeType, names: set[str]) -> bool:
    found = list(dis.get_instructions(code))
    return all(
        after.opname in ("LOAD_METHOD", "LOAD_ATTR") and after.argval in _ADDS
        for here, after in pairwise(found)
        if here.opname in _LOADS and here.argval in names
    )
