"""The threads that post messages and let go of what was sent: posting costs host time that computing need not pay."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from gapless.run.ranks.wire.message import Message

_PATIENCE = 0.5  # seconds


class Courier:
    """The thread that posts, and the one that lets go of what was sent. The first failure is kept for all to see, and
    told.
    """

    def __init__(self, group: Any, name: str, tell: Callable[[BaseException], None]) -> None:
        self.group, self._tell = group, tell
        self.failure: BaseException | None = None
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        self._over: queue.SimpleQueue[list[tuple[Any, Message | None]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._post, name=f"{name} posts", daemon=True),
            threading.Thread(target=self._retire, name=f"{name} retires", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def retire(self, sends: "list[tuple[Any, Message | None]]") -> None:
        """Lets go of these once they are over; they are never looked at one by one, since waking up costs too."""
        self._over.put(sends)

    def _post(self) -> None:
        torch.set_grad_enabled(False)
        while (job := self._jobs.get()) is not None:
            do, argument = job
            try:
                do(argument)
            except BaseException as error:
                self.failure = self.failure or error
                self._tell(error)
            del job, do, argument  # what was sent must not stay until the next one comes
        self._over.put(None)

    def _retire(self) -> None:
        while (sends := self._over.get()) is not None:
            for work, message in sends:
                try:
                    work.wait()
                    if message is not None:
                        message.sent()
                except BaseException as error:
                    self.failure = self.failure or error
            sends.clear()
            del sends

    def flush(self) -> None:
        """Returns when everything handed over so far is done."""
        done = threading.Event()
        self.put((lambda _: done.set(), None))
        done.wait()

    def close(self, broken: Callable[[], bool] = lambda: False) -> None:
        """Everything handed over goes out first, unless connections are broken: Gloo forgets some sends then, and the
        thread that waits for them is left to the end of the process.
        """
        self.put(None)
        for thread in self._threads:
            while thread.is_alive():
                given_up = broken()
                thread.join(_PATIENCE)
                if given_up:
                    break
