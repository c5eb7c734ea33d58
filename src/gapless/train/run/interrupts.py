"""SIGTERM and Ctrl-C end a run after the step under way, so that it can be saved. A second one ends it at once.

On ranks the pipeline takes care of SIGTERM, since all of them must end after the same step; Ctrl-C becomes a SIGTERM.
"""

import os
import signal
import threading
from functools import partial
from types import FrameType
from typing import Any

from gapless.train.run.trainer import SIGTERM, Callback, Trainer

CTRL_C = "Ctrl-C"


class Interrupts(Callback):
    """Our handlers, from the first step to the last. `alone`: there are no other ranks."""

    def __init__(self, *, alone: bool = True) -> None:
        self._alone = alone
        self._before: dict[int, Any] = {}
        self.interrupted = False

    def on_start(self, trainer: Trainer) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        mine = (signal.SIGINT, signal.SIGTERM) if self._alone else (signal.SIGINT,)
        self._before = {each: signal.signal(each, partial(self._hear, trainer)) for each in mine}

    def on_end(self, trainer: Trainer) -> None:
        self._restore()

    def _hear(self, trainer: Trainer, number: int, frame: FrameType | None) -> None:
        self._restore()  # the next one is not ours
        self.interrupted = self.interrupted or number == signal.SIGINT
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            trainer.stop(CTRL_C if number == signal.SIGINT else SIGTERM)

    def _restore(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._before = {}
