"""Which attributes of its modules a model reads while it is traced: a trace has their values of that time.

Parameters, buffers and parts are looked up in another way; what is left are the numbers, flags, lists and settings that
a forward decides by: the rate of a dropout, a scale, a config; an instance has them, or its class.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .instead import instead

_TORCHS = frozenset((*nn.Module().__dict__, *dir(nn.Module)))
Noted = dict[nn.Module, dict[str, None]]


@contextlib.contextmanager
def noted(reads: Noted) -> Iterator[None]:
    """While it holds, what this thread reads is put into `reads`, by module."""

    def noting(get: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
        def read(module: nn.Module, name: str) -> Any:
            value = get(module, name)
            if name not in _TORCHS:
                reads.setdefault(module, {})[name] = None
            return value

        return read

    with instead(nn.Module, "__getattribute__", noting):
        yield
