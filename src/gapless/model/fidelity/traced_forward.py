"""What holds in the forward of a model that is traced, and only there.

A trace reads thousands of attributes before and after the forward, and sets as many. To watch all of them took a
tenth of its time: while a mode of torch is on, torch calls it even for the shape of a tensor.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import nn


@contextlib.contextmanager
def in_forward(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it holds, this context is entered whenever the model is called, before its hooks, and left after them. A
    mode of torch sees a call before those that were on already.
    """
    entered: list[AbstractContextManager[Any]] = []  # by each call under way: a forward may call its model again

    def enter(*_: Any) -> None:
        entered.append(context())
        entered[-1].__enter__()

    def leave(*_: Any) -> None:
        entered.pop().__exit__(None, None, None)

    first = model.register_forward_pre_hook(enter, prepend=True)
    last = model.register_forward_hook(leave, always_call=True)
    try:
        yield
    except BaseException:
        while entered:  # torch does not call such a hook for a trace that fails
            entered.pop().__exit__(*sys.exc_info())
        raise
    finally:
        first.remove()
        last.remove()
