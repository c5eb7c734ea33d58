"""Random draws in a backward: in a hook on a tensor or a weight, in the backward of a function of the user's own.

In the plain loop such a draw goes on where the layers of its microbatch have left torch's default generators. Here
layers have private ones, and other microbatches are under way, so the plain loop's numbers can't be had, and the first
backward that a stage runs in a step tells whether somebody asks for them. A generator of the user's own is another
matter: backwards run in microbatch order, so what one half of the backwards of one stage has to itself is exact.

`torch.utils.checkpoint` runs layers again in a backward, and brings the generators to where they stood.
"""

import sys
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F

from gapless.guards.process_wide import BACKWARD_DRAWS, SHARED_GENERATORS
from gapless.stage.norm.running_statistics import Statistics
from gapless.stage.split.call_mode import Handler, Mode

from .draws import Draws, own_generator
from .random_calls import RANDOM, RECURRENT, attention, dropout, recurrent

_CHECKPOINT, _BACKWARD = "torch.utils.checkpoint", "torch.autograd"  # the modules with these functions


class BackwardMode(Mode):
    """Around a backward, or around one half of it. `users`: by generator of their own, who has drawn from it."""

    def __init__(self, draws: Draws, statistics: Statistics, users: MutableMapping[torch.Generator, object]) -> None:
        super().__init__(draws, statistics, _TABLE)
        self.alone = True  # nothing is answered from private generators
        self._users = users

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = own_generator(kwargs)
        if not _runs_again():
            name = getattr(func, "__name__", func)
            if own is None:
                raise BACKWARD_DRAWS.refusal(
                    f"a hook, or the backward of a function, calls {name}, which draws from torch's default "
                    "generator, and in a pipeline its numbers would differ from those of the plain loop"
                )
            if self._users.setdefault(own, self) is not self:
                raise SHARED_GENERATORS.refusal(
                    f"a hook, or the backward of a function, calls {name} with a torch.Generator that a forward or "
                    "another stage draws from too, in another order than plain training",
                    "give each hook its own generator",
                )
        return self.plain(func, args, kwargs)


def _draw(mode: Mode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return mode.draw(func, args, kwargs)


_TABLE: dict[Any, Handler] = {
    F.dropout: dropout,
    F.scaled_dot_product_attention: attention,
    **dict.fromkeys(RANDOM, _draw),
    **dict.fromkeys(RECURRENT, recurrent),
}


def _runs_again() -> bool:
    """Whether it is a checkpoint that runs the code that called us, and not a hook in a backward of its own."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if name in (_CHECKPOINT, _BACKWARD):
            return bool(name == _CHECKPOINT)
    return False
