"""What takes time and no test looks at: left out wherever tests run, in their own processes and in ranks."""

import gc
import math
from types import SimpleNamespace

import torch
import torch.fx.proxy

from gapless import slow_work


def leave_out() -> None:
    """A word while the user waits, which would get between what is compared; test_slow_work.py has its own limit.
    The seeds that torch keeps for a GPU that may be used later, with the stack of their call. The stack of every call
    that is traced. Most of the looks of Python's collector: a trace would make it look hundreds of times.
    """
    gc.set_threshold(20_000, 20, 50)
    vars(slow_work)["_LONG"] = math.inf
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            vars(kind)["manual_seed_all"] = lambda seed: None
    stack = SimpleNamespace(summary=lambda: None)
    vars(torch.fx.proxy)["CapturedTraceback"] = SimpleNamespace(extract=lambda **_: stack)
