"""Parameters that meet in pairs: a fault nearly always needs one value or two, and a product has each pair often."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest


def leave_pairs(items: Iterable[pytest.Item]) -> None:
    """Of a test that is marked `in_pairs`, all are slow but for some in which any two of its values meet."""
    products = defaultdict[str, dict[pytest.Item, set[Any]]](dict)
    for item in items:
        if item.get_closest_marker("in_pairs") and not item.get_closest_marker("slow"):
            values = [(name, id(value)) for name, value in item.callspec.params.items()]  # type: ignore[attr-defined]
            products[item.nodeid.partition("[")[0]][item] = set(combinations(values, 2))
    for pairs in products.values():
        waiting, rest = set[Any]().union(*pairs.values()), list(pairs)
        while waiting:
            best = max(rest, key=lambda item: len(waiting & pairs[item]))
            waiting -= pairs[best]
            rest.remove(best)
        for item in rest:
            item.add_marker(pytest.mark.slow)
