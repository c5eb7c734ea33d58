"""The keys of a config. Each is a field of its table, a dataclass, and a line of that table's docstring:

    steps = 100  number of updates                         an example, and what is said of it
    clip = 1.0  the norm ... | none                        behind the bar: its default, in words
    minibatch = 16  samples in a step | needed: as 16      or what to write, of a key that has none

    steps: Annotated[int, whole()] = 100                   how it is read, and its default

Every fault is told at once, with its key and what is allowed there.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from inspect import cleandoc
from typing import Any, ClassVar, NamedTuple, get_args

from gapless import units
from gapless.errors import ConfigError, ScheduleError, did_you_mean, printable
from gapless.schedule.recipes import find_recipe

Reader = Callable[[Any], Any]
_ENTRY = re.compile(r"(\w+) = (.*?)  (.*?)(?: \| (needed: )?(.*))?")


class Part:
    """What is made by calling a function with arguments; `key` is the table of the config that says so."""

    key: ClassVar[str]
    known: ClassVar[Mapping[str, str]]
    name: Any
    arguments: Mapping[str, Any]

    @property
    def where(self) -> str:
        """ "package.module:function", or "file.py:function"."""
        return str(self.known.get(self.name, self.name))

    @property
    def is_own(self) -> bool:
        """A function of the user's, of which nothing is known."""
        return self.name not in self.known


class Key(NamedTuple):
    """What is known of a key.

    read     what a value of the file means; it raises a ConfigError that goes on after the key: "is 3, but ..."
    default  MISSING where it must be given
    example  a value as it stands in a file; the commented config shows it
    what     its line in the manual
    usual    says the default where that is no plain value, and what to write where there is none
    """

    read: Reader
    default: Any
    example: str
    what: str
    usual: str


@cache
def keys_of(kind: type) -> dict[str, Key]:
    """The keys of a table by name."""
    entries = re.split(r"\n(?=\S)", cleandoc(kind.__doc__ or "").partition("\n\n")[2])
    said = {}
    for entry in entries:
        known = _ENTRY.fullmatch(re.sub(r"\n\s+", " ", entry))
        assert known is not None, entry
        said[known[1]] = (known[2], known[3], known[5] or "")
    found = {}
    for each in fields(kind):
        (read,) = next(hint.__metadata__ for hint in (each.type, *get_args(each.type)) if hasattr(hint, "__metadata__"))
        default = each.default if each.default_factory is MISSING else each.default_factory()
        found[each.name] = Key(read, default, *said[each.name])
    return found


def read_tables(data: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The tables of a file, each as its dataclass; one that is not there, with defaults alone. They are read on after a
    fault, so that all of them can be told at once.
    """
    faults, found = list(_misnamed("", data, kinds, kinds)), {}
    for name, kind in kinds.items():
        known, rows = keys_of(kind), data.get(name, {})
        must = [word for word, key in known.items() if key.default is MISSING]
        values: dict[str, Any] = {}
        if not isinstance(rows, Mapping):
            faults.append(f"{name} is {rows!r:.40}, but it must be a table: write [{name}] and below it its keys")
        elif name not in data and must:
            faults.append(f"[{name}] is missing: write [{name}] and below it {' and '.join(must)} = ...")
        else:
            faults += _misnamed(name, rows, known, kinds)
            for word, key in known.items():
                try:
                    if word in rows:
                        values[word] = key.read(rows[word])
                    elif key.default is MISSING:
                        raise ConfigError(f"is missing: {key.usual}")
                except ConfigError as error:
                    faults.append(f"{name}.{word} {error}")
        found[name] = (kind, values)
    if faults:
        raise ConfigError("; ".join(faults))
    return {name: kind(**values) for name, (kind, values) in found.items()}


def _misnamed(
    table: str, given: Mapping[str, Any], known: Mapping[str, Any], kinds: Mapping[str, type]
) -> Iterator[str]:
    """A key that stands in the wrong table is as good as one that is spelt wrong."""
    for word in (word for word in given if word not in known):
        there = sorted(f"{name}.{word}" for name, kind in kinds.items() if name != table and word in keys_of(kind))
        hint = f"did you mean {there[0]}?" if there else f"{table or 'a config'} takes {', '.join(known)}"
        hint = hint if there and not table else did_you_mean(word, known, hint)
        yield f"{f'{table}.' if table else ''}{printable(word[:60])} is not understood; {hint}"


# -- readers ----------------------------------------------------------------------------------------------------------


def must(fits: Callable[[Any], bool], be: str, made: Reader = lambda value: value) -> Reader:
    """Refuses a value that does not fit; it must `be` something else."""

    def read(value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"is {value!r:.40}, but it must be {be}")
        return made(value)

    return read


text = must(lambda value: isinstance(value, str) and value != "", "a text")
positive = must(lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0", float)
arguments = must(lambda value: isinstance(value, Mapping), "a table such as { width = 64, depth = 8 }")
overlap = must(lambda value: isinstance(value, bool) or value == "auto", "true, false or 'auto'")
truth = must(lambda value: isinstance(value, bool), "true or false")


def whole(least: int = 1) -> Reader:
    """A whole number."""
    return must(lambda value: type(value) is int and least <= value < 2**53, f"a whole number of at least {least}")


def share(*, below: bool) -> Reader:
    """A part of one."""
    return must(
        lambda value: type(value) in (int, float) and 0 <= value <= 1 and not (below and value == 1),
        "a number of at least 0 and below 1" if below else "a number from 0 to 1",
        float,
    )


def listed(read: Reader, what: str) -> Reader:
    """A list of such values."""
    return must(lambda value: isinstance(value, list) and value != [], what, lambda value: tuple(map(read, value)))


def one_of(*allowed: str) -> Reader:
    """One of these words; the nearest one is suggested."""

    def read(value: Any) -> str:
        word: str = text(value)
        if word not in allowed:
            hint = did_you_mean(word, allowed, f"it is {', '.join(allowed)}")
            raise ConfigError(f"is {word[:60]!r}, which is not known; {hint}")
        return word

    return read


def named(known: Mapping[str, str]) -> Reader:
    """A name from the list, or a function of the user's."""
    short = {where: each for each, where in known.items()}

    def read(value: Any) -> str:
        name: str = text(value)
        module, colon, function = name.rpartition(":")
        if not (colon and module and function.isidentifier()) and name not in known:
            hint = did_you_mean(name, known, f"it is {', '.join(known)}, or your own as 'file.py:function'")
            raise ConfigError(f"is {name[:60]!r}, which is not known; {hint}")
        return short.get(name, name)  # the same, and as much is known of it

    return read


def devices(value: Any) -> Any:
    """How many, or which."""
    read = whole() if type(value) is int else listed(_device, "a number, or a list such as ['cuda:0', 'cuda:1']")
    return read(value)


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", value):
        raise ConfigError(f"has {value!r:.40}, but a device is 'cpu', or as 'cuda:0'")
    return value


def memory(value: Any) -> int | str | tuple[int | str, ...]:
    """Bytes as people write them, of all devices or of each."""
    many: Sequence[Any] = value if isinstance(value, list) else [value]
    for each in many:
        units.read_bytes(each)
    return tuple(many) if isinstance(value, list) else value


def schedule(value: Any) -> str:
    """The name of a recipe."""
    name: str = text(value)
    try:
        find_recipe(name)
    except ScheduleError as error:
        raise ConfigError(f"is {name[:60]!r}, but {error}") from None
    return name


def of_stages(*words: str) -> Callable[[Any], Any]:
    """One of these words for all stages, or for each."""

    def checked(value: Any) -> Any:
        for each in value if isinstance(value, list) and value else [value]:
            if each not in words:
                allowed = f"{', '.join(words)}, or a list with one of these per stage"
                raise ConfigError(f"is {each!r:.40}, but it must be {allowed}")
        return tuple(value) if isinstance(value, list) else value

    return checked
