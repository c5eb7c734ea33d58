"""Which attributes of its modules a model reads while it is traced: a trace has their values of that time.

Parameters, buffers and parts are looked up in another way; what is left are the numbers, flags, lists and settings that
a forward decides by: the rate of a dropout, a scale, a config; an instance has them, or its class.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn

_TORCHS = frozenset((*nn.Module().__dict__, *dir(nn.Module)))
Noted = dict[nn.Module, dict[str, None]]


@contextlib.contextmanager
def noted(reads: Noted) -> Iterator[None]:
    """While it holds, what this thread reads is put into `reads`, by module."""
    thread, get = threading.get_ident(), object.__getattribute__

    def noting(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        if name not in _TORCHS and threading.get_ident() == thread:
            reads.setdefault(self, {})[name] = None
        return value

    before = nn.Module.__dict__.get("__getattribute__")
    nn.Module.__getattribute__ = noting  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        if before is None:
            del nn.Module.__getattribute__
        else:
            nn.Module.__getattribute__ = before  # type: ignore[method-assign]
