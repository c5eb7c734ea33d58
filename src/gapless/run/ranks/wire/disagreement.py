"""Where two ranks disagree, in words."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

SAME = "all ranks make the same calls, with the same arguments"
_SHOWN = 80  # characters of a value
_MOST_SHOWN = 5


def differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Where two facts differ: the name of the place, and both values."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            place = f"{name} {key}".strip()
            if key in one and key in other:
                yield from differences(one[key], other[key], place)
            else:
                here, there = (_shown(facts[key]) if key in facts else "missing" for facts in (one, other))
                yield place, here, there
    elif one != other:
        yield name, _shown(one), _shown(other)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def disagreement(one: Mapping[str, Any], other: Mapping[str, Any], first: int, me: int) -> str:
    """Of what rank `first` has and what this one has; empty if it is the same."""
    found = list(differences(one, other))
    each = "; ".join(
        f"{name} is {one} on rank {first} and {other} on rank {me}" for name, one, other in found[:_MOST_SHOWN]
    )
    more = f"; and {len(found) - _MOST_SHOWN} more differences" if len(found) > _MOST_SHOWN else ""
    return f"the ranks disagree: {each}{more}; {SAME}" if found else ""
