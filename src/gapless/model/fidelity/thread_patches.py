"""What the thread that traces calls in place of torch's own functions; other threads notice nothing, and wait if they
would trace too: what stands in one place can be put back by one only.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from gapless.stage.random.exclusive import exclusively


@contextlib.contextmanager
def instead(place: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """While it holds, this thread calls `ours`, with the original before its arguments, where others call the original:
    a function of a module, or a method of a class.
    """
    with exclusively():
        before = place.__dict__.get(name)
        for_class = isinstance(before, classmethod | types.ClassMethodDescriptorType)  # of Python, or of C

        def bound(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return before.__get__(None, cls)(*args, **kwargs)

        original = bound if for_class else getattr(place, name)
        here, thread = functools.partial(ours, original), threading.get_ident()

        def call(*args: Any, **kwargs: Any) -> Any:
            return (here if threading.get_ident() == thread else original)(*args, **kwargs)

        setattr(place, name, classmethod(call) if for_class else call)
        try:
            yield
        finally:
            if before is None:  # it was inherited
                delattr(place, name)
            else:
                setattr(place, name, before)
