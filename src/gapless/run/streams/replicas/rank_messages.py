"""Letters between two ranks: a word, some numbers, and tensors. They arrive whole and in order. Each says how many have
come from the other side, which may let go of those.

Nothing here waits for the other side: a thread sends and another one listens, so that Ctrl-C in the caller's thread
never leaves half a letter behind.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from gapless.errors import ConfigError
from gapless.run.ranks.wire.groups import Group
from gapless.run.ranks.wire.message import Reader, Writer

_HEAD_TAG, _LETTER_TAG = 2, 3
_A_WHILE = timedelta(seconds=1)


class RankMessage(NamedTuple):
    """What one rank writes to another."""

    kind: str
    numbers: tuple[int, ...] = ()
    words: str = ""
    tensors: Any = None  # a tree

    def written(self) -> list[Any]:
        """As the wire takes it: what differs from letter to letter is in tensors."""
        words = torch.frombuffer(bytearray(self.words.encode() or b" "), dtype=torch.uint8)
        return [self.kind, torch.tensor(self.numbers, dtype=torch.int64), words, self.tensors]

    @classmethod
    def read(cls, tree: Any) -> "RankMessage":
        """What `written` gave."""
        kind, numbers, words, tensors = tree
        return cls(kind, tuple(numbers.tolist()), words.numpy().tobytes().decode().strip(), tensors)


Heard = Callable[[RankMessage], None]


class Mailbox:
    """With one other rank; the group has these two. `heard` gets each letter, in a thread of ours, and `lost` the error
    when no more can come.
    """

    def __init__(self, group: Group, other: int, heard: Heard, lost: Callable[[BaseException], None]) -> None:
        self._group, self._other, self._heard, self._lost = group, 1 - group.rank(), heard, lost
        self._outbox: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._sent: deque[tuple[Any, ...]] = deque()  # letters that the other side may not have yet, and must stay
        self._arrived = self._came = 0  # how many the other side has said to have, and how many came here
        self._threads = [
            threading.Thread(target=target, name=f"gapless {word} rank {other}", daemon=True)
            for word, target in (("writes to", self._write), ("hears", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, letter: RankMessage) -> None:
        """Does not wait. Its tensors must stay as they are until there is an answer."""
        self._outbox.put(letter)

    def _write(self) -> None:
        writer = Writer()
        try:
            while (letter := self._outbox.get()) is not None:
                try:
                    message = writer.write(letter.written())
                except ConfigError as error:  # of a tensor that can't be sent; what comes next may be
                    self._lost(error)
                    continue
                message.free = None  # whether it has left is known only later
                head = torch.tensor([message.buffer.numel(), self._came])
                works: list[Any] = []
                self._sent.append((works, head, message))  # first: the answer may be here before the next line
                for tensor, tag in ((head, _HEAD_TAG), (message.buffer, _LETTER_TAG)):
                    works.append(self._group.send([tensor], self._other, tag))
                del letter, message
        except Exception as error:
            self._lost(error)

    def _listen(self) -> None:
        reader, head = Reader(), torch.zeros(2, dtype=torch.int64)
        try:
            while True:
                self._group.recv([head], self._other, _HEAD_TAG).wait()
                size, arrived = head.tolist()
                buffer = torch.empty(size, dtype=torch.uint8)
                self._group.recv([buffer], self._other, _LETTER_TAG).wait()
                self._came += 1
                for _ in range(arrived - self._arrived):
                    self._sent.popleft()
                self._arrived = arrived
                letter = RankMessage.read(reader.read(buffer))
                del buffer
                self._heard(letter)
                del letter
        except Exception as error:
            self._lost(error)

    def break_off(self) -> None:
        """Whoever waits here raises, on both sides."""
        self._group.break_off()

    def close(self) -> None:
        """What was written leaves first."""
        self._outbox.put(None)
        self._threads[0].join()
        with contextlib.suppress(RuntimeError, IndexError):
            for work in self._sent[-1][0]:
                work.wait(_A_WHILE)
        self._group.break_off()
        self._threads[1].join()
        self._sent.clear()
        self._group.close()


class OwnMailbox:
    """The same to oneself: whoever answers does so in a thread of ours, where no Ctrl-C comes."""

    def __init__(self, heard: Heard, lost: Callable[[BaseException], None]) -> None:
        self._heard, self._lost = heard, lost
        self._outbox: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="gapless shared weights", daemon=True)
        self._thread.start()

    def send(self, letter: RankMessage) -> None:
        """Does not wait."""
        self._outbox.put(letter)

    def _pass_on(self) -> None:
        try:
            while (letter := self._outbox.get()) is not None:
                self._heard(letter)
                del letter
        except Exception as error:
            self._lost(error)

    def close(self) -> None:
        """What was written is passed on first."""
        self._outbox.put(None)
        self._thread.join()
