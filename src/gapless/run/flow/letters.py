"""Letters between two ranks: a word, some numbers, and tensors. They arrive whole and in order.

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

from gapless.run.ranks.wire.groups import Group
from gapless.run.ranks.wire.message import Reader, Writer

_SIZE_TAG, _LETTER_TAG = 2, 3
_A_WHILE = timedelta(seconds=1)


class Letter(NamedTuple):
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
    def read(cls, tree: Any) -> "Letter":
        """What `written` gave."""
        kind, numbers, words, tensors = tree
        return cls(kind, tuple(numbers.tolist()), words.numpy().tobytes().decode().strip(), tensors)


Heard = Callable[[Letter], None]


class Mail:
    """With one other rank; the group has these two. `heard` gets each letter, in a thread of ours, and `lost` the error
    when no more can come.
    """

    def __init__(self, group: Group, other: int, heard: Heard, lost: Callable[[BaseException], None]) -> None:
        self._group, self._other, self._heard, self._lost = group, 1 - group.rank(), heard, lost
        self._outbox: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._sent: deque[tuple[Any, ...]] = deque()  # must stay until they have left
        self._threads = [
            threading.Thread(target=target, name=f"gapless {word} rank {other}", daemon=True)
            for word, target in (("writes to", self._write), ("hears", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, letter: Letter) -> None:
        """Does not wait. Its tensors must stay as they are until there is an answer."""
        self._outbox.put(letter)

    def _write(self) -> None:
        writer = Writer()
        try:
            while (letter := self._outbox.get()) is not None:
                message = writer.write(letter.written())
                message.free = None  # whether it has left is known only later
                size = torch.tensor([message.buffer.numel()])
                works = [
                    self._group.send([tensor], self._other, tag)
                    for tensor, tag in ((size, _SIZE_TAG), (message.buffer, _LETTER_TAG))
                ]
                self._sent.append((works, size, message))
                del letter, message
        except Exception as error:  # a tensor that can't be sent, or a closed connection
            self._lost(error)

    def _listen(self) -> None:
        reader, size = Reader(), torch.zeros(1, dtype=torch.int64)
        try:
            while True:
                self._group.recv([size], self._other, _SIZE_TAG).wait()
                buffer = torch.empty(int(size), dtype=torch.uint8)
                self._group.recv([buffer], self._other, _LETTER_TAG).wait()
                while len(self._sent) > 1:  # an answer: what came before the last letter was read
                    self._sent.popleft()
                letter = Letter.read(reader.read(buffer))
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


class OwnMail:
    """The same to oneself: whoever answers does so in a thread of ours, where no Ctrl-C comes."""

    def __init__(self, heard: Heard, lost: Callable[[BaseException], None]) -> None:
        self._heard, self._lost = heard, lost
        self._outbox: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="gapless shared weights", daemon=True)
        self._thread.start()

    def send(self, letter: Letter) -> None:
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
