"""What a user sees when a step fails: the frames of their own code, then our sentence. Frames of ours say nothing to
them; with GAPLESS_TRACEBACK=full they are shown.
"""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_HERE = str(Path(__file__).parent.parent) + os.sep


def short_tracebacks(call: Callable[P, R]) -> Callable[P, R]:
    """A public call whose errors show no other frame of ours than its own."""

    @functools.wraps(call)
    def shortened(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if os.environ.get("GAPLESS_TRACEBACK") != "full":
                error.__traceback__ = _without_ours(error.__traceback__)
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
