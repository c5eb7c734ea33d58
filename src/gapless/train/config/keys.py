"""The keys of a config: each is defined once, with how it is read and what is said of it.

    steps: int = key(whole(), "number of updates", 100)

is a field of a dataclass, its reader, its default and its line in the manual. Every fault is told at once, with its key
and what is allowed there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, TypeVar

from gapless.errors import ConfigError, printable

Reader = Callable[[Any], Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """What is known of a key beside its name, its type and its default.

    read     what a value of the file means; it raises a ConfigError that goes on after the key: "is 3, but ..."
    what     its line in the manual
    example  a value as it stands in a file; the commented config shows it
    usual    says the default where that is no plain value
    needed   what to write, of a key that has no default
    """

    read: Reader
    what: str
    example: str
    usual: str
    needed: str | None


def key(
    read: Reader, what: str, default: Any = None, *, example: str, usual: str = "", needed: str | None = None
) -> Any:
    """A field of a table; the default {} is a new one each time."""
    known = {"key": Key(read, what, example, usual, needed)}
    return field(default_factory=dict, metadata=known) if default == {} else field(default=default, metadata=known)


def keys_of(kind: type) -> dict[str, tuple[Key, Any]]:
    """The keys of a table by name, each with its default."""
    return {each.name: (each.metadata["key"], {} if each.default is MISSING else each.default) for each in fields(kind)}


class Tables:
    """The tables of a file. They are read on after a fault, so that all of them can be told at once."""

    def __init__(self, data: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
        self._data, self._kinds = data, kinds
        self.faults: list[str] = []
        self._check_names("", data, kinds)

    def has(self, name: str) -> bool:
        return name in self._data

    def read(self, name: str) -> Any:
        """The table of that name as its dataclass; where it is not in the file, with defaults alone."""
        kind = self._kinds[name]
        known = keys_of(kind)
        rows, must = self._data.get(name, {}), [key for key, (each, _) in known.items() if each.needed is not None]
        if not isinstance(rows, Mapping):
            self.faults.append(f"{name} is {rows!r:.40}, but it must be a table: write [{name}] and below it its keys")
            return kind()
        if name not in self._data and must:
            self.faults.append(f"[{name}] is missing: write [{name}] and below it {' and '.join(must)} = ...")
            return kind()
        self._check_names(name, rows, known)
        found = {}
        for word, (each, default) in known.items():
            try:
                if word in rows:
                    found[word] = each.read(rows[word])
                elif each.needed is not None:
                    raise ConfigError(f"is missing: {each.needed}")
            except ConfigError as error:
                self.faults.append(f"{name}.{word} {error}")
                found[word] = default
        return kind(**found)

    def _check_names(self, table: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """A key that stands in the wrong table is as good as one that is spelt wrong."""
        elsewhere = {f"{name}.{word}" for name, kind in self._kinds.items() if name != table for word in keys_of(kind)}
        for word in given:
            if word in known:
                continue
            near = get_close_matches(word, known, n=1)
            there = sorted(each for each in elsewhere if each.partition(".")[2] == word)
            if there and not (near and table):
                near = there[:1]
            hint = f"did you mean {near[0]}?" if near else f"{table or 'a config'} takes {', '.join(known)}"
            self.faults.append(f"{f'{table}.' if table else ''}{printable(word[:60])} is not understood; {hint}")


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
arguments = must(lambda value: isinstance(value, Mapping), "a table, as { width = 64, depth = 8 }")
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
            near = get_close_matches(word.lower(), allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it is {', '.join(allowed)}"
            raise ConfigError(f"is {word[:60]!r}, which is not known; {hint}")
        return word

    return read


def named(known: Mapping[str, str]) -> Reader:
    """A name from the list, or a function of the user's."""

    def read(value: Any) -> str:
        name: str = text(value)
        module, colon, function = name.rpartition(":")
        if not (colon and module and function.isidentifier()) and name not in known:
            alike = {each.lower(): each for each in known}
            near = get_close_matches(name.lower(), alike, n=1)
            allowed = f"it is {', '.join(known)}, or your own as 'file.py:function'"
            hint = f"did you mean {alike[near[0]]}?" if near else allowed
            raise ConfigError(f"is {name[:60]!r}, which is not known; {hint}")
        return name

    return read
