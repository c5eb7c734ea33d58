"""Messages between two ranks: a word, some numbers, and tensors. They arrive whole and in order.

Nothing here waits for the other side: a courier sends and a thread of ours listens, so that Ctrl-C in the caller's
thread never leaves half a message behind.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from gapless.run.ranks.watch.blame import is_lost
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


class ServerConnections:
    """Of one replica with the parameter server, which the first rank has, and on that rank with all others. `explain`
    makes what is raised where a rank, or none in particular, is lost.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        number: int,
        connect: Callable[..., Any],
        explain: Callable[[int, BaseException], Exception],
    ) -> None:
        self._ranks, self._number, self._explain = ranks, number, explain
        self._inbox: queue.SimpleQueue[RankMessage | tuple[int, BaseException]] = queue.SimpleQueue()
        self._mails: dict[int, Mailbox] = {}
        self._own: Courier | None = None  # passes on what the first rank tells itself
        self._take: Callable[[int, RankMessage], None] | None = None
        # A connection for each replica but the first.
        others = range(1, len(ranks)) if number == 0 else (number,)
        self._pairs = {other: connect("messages", (ranks[0], ranks[other]), int(number > 0)) for other in others}

    def open(self, take: Callable[[int, RankMessage], None] | None) -> None:
        """`take` is the server's: what it does with a message of a replica."""
        self._take = take
        if take is not None:
            self._own = Courier(None, "gapless shared weights", partial(self._lost, 0))
        for other, pair in self._pairs.items():
            end, heard = (0, self._inbox.put) if take is None else (other, partial(take, other))
            self._mails[end] = Mailbox(pair, self._ranks[end], heard, partial(self._lost, end))

    def send(self, replica: int, message: RankMessage) -> None:
        """From the server."""
        if replica == self._number:
            self._inbox.put(message)
        else:
            self._mails[replica].send(message)

    def tell_server(self, message: RankMessage) -> None:
        """In a thread of ours also where it is here, in which no Ctrl-C comes."""
        if self._own is not None and self._take is not None:
            self._own.put((partial(self._take, 0), message))
        else:
            self._mails[0].send(message)

    def _lost(self, replica: int, error: BaseException) -> None:
        self._inbox.put((replica, error))

    def next(self, missing: Collection[int] | None = None) -> RankMessage:
        """What came. A replica that has closed its connection is missed only if it is among those `missing`."""
        gone = []
        try:
            while True:
                message = self._inbox.get()
                if isinstance(message, RankMessage):
                    return message
                replica, error = message
                if not is_lost(error):
                    raise error
                gone.append(message)
                if missing is not None and replica not in missing:
                    continue
                raise self._explain(self._ranks[replica], error) from None
        finally:
            for each in gone:  # for whoever asks next
                self._inbox.put(each)

    def break_off(self) -> None:
        """Whoever waits here raises, on all sides."""
        for mail in self._mails.values():
            mail.break_off()

    def close(self) -> None:
        """What was written leaves first."""
        if self._own is not None:
            self._own.close()
        for mail in self._mails.values():
            mail.close()
        self._mails = {}
