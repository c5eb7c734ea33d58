"""Messages between two ranks: a word, some numbers, and tensors. They arrive whole and in order.

Nothing here waits for the other side: a courier sends and a thread of ours listens, so that Ctrl-C in the caller's
thread never leaves half a message behind.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gapless.run.ranks.wire.channel import Courier, Outgoing, Waiting
from gapless.run.ranks.wire.gloo import GlooIncoming, GlooOutgoing
from gapless.run.ranks.wire.groups import Group

_KIND = "update"  # of the one channel each way
_A_WHILE = 1.0  # seconds


class RankMessage(NamedTuple):
    """What one rank writes to another."""

    kind: str
    numbers: tuple[int, ...] = ()
    words: str = ""
    tensors: Any = None  # a tree

    def written(self) -> list[Any]:
        """As the wire takes it: what differs from message to message is in tensors."""
        words = torch.frombuffer(bytearray(self.words.encode() or b" "), dtype=torch.uint8)
        return [self.kind, torch.tensor(self.numbers, dtype=torch.int64), words, self.tensors]

    @classmethod
    def read(cls, tree: Any) -> "RankMessage":
        """What `written` gave."""
        kind, numbers, words, tensors = tree
        return cls(kind, tuple(numbers.tolist()), words.numpy().tobytes().decode().strip(), tensors)


class Mailbox:
    """With one other rank; the group has these two. `heard` gets each message, in a thread of ours, and `lost` the
    error when no more can come.
    """

    def __init__(
        self, group: Group, other: int, heard: Callable[[RankMessage], None], lost: Callable[[BaseException], None]
    ) -> None:
        self._group, self._heard, self._lost = group, heard, lost
        self._courier, peer = Courier(group, f"gapless rank {other}", lost), 1 - group.rank()
        stamp = self._courier.stamp  # which never changes: all messages are of one call
        waiting = Waiting(lambda _, error: RuntimeError(error), stamp, lambda _, source: RuntimeError(source))
        self._outgoing = GlooOutgoing(self._courier, peer, _KIND)
        self._incoming = GlooIncoming(self._courier, waiting, peer, _KIND)
        self._thread = threading.Thread(target=self._listen, name=f"gapless hears rank {other}", daemon=True)
        self._thread.start()

    def send(self, message: RankMessage) -> None:
        """Does not wait. Its tensors must stay as they are until there is an answer."""
        self._outgoing.put(message.written())

    def _listen(self) -> None:
        try:
            while True:
                self._heard(RankMessage.read(self._incoming.next()))
        except Exception as error:
            self._lost(error)

    def break_off(self) -> None:
        """Whoever waits here raises, on both sides."""
        self._group.break_off()

    def close(self) -> None:
        """What was written leaves first."""
        deadline = time.monotonic() + _A_WHILE
        self._courier.put((Outgoing.settle, self._outgoing))
        self._courier.close(lambda: time.monotonic() > deadline)
        self._group.break_off()
        self._thread.join()
        self._incoming.close()
        self._group.close()
