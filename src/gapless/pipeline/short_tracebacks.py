"""What a user sees when a call fails: the frames of their own code, then our sentence. Frames of ours say nothing to
them, nor do those of torch behind a sentence of ours; with GAPLESS_TRACEBACK=full all are shown.
"""

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from gapless.errors import GaplessError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
_HERE = str(Path(__file__).parent.parent) + os.sep


def public_calls(name: str) -> Callable[[C], C]:
    """A class that users know as `name`: the errors of its public calls are short, and speak of it by that name."""

    def known(made: C) -> C:
        for word, call in list(vars(made).items()):
            if inspect.isfunction(call) and (word in ("__init__", "__call__") or not word.startswith("_")):
                inspect.unwrap(call).__qualname__ = name if word == "__init__" else f"{name}.{word}"
                setattr(made, word, short_tracebacks(call))
        return made

    return known


def short_tracebacks(call: Callable[P, R]) -> Callable[P, R]:
    """A public call whose errors show no other frame of ours than its own."""

    @functools.wraps(call)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if os.environ.get("GAPLESS_TRACEBACK") != "full":
                error.__traceback__ = _without_ours(error.__traceback__)
                if isinstance(error, GaplessError):
                    error.__cause__ = None  # what matters of it is in the sentence
            raise

    return shortened


def _without_ours(found: TracebackType | None) -> TracebackType | None:
    kept = []
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(found)
        found = found.tb_next
    made = None
    for each in reversed(kept):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made
