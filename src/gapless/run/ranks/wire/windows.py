"""How many receives of what size are posted ahead: known to both ends of a channel without a word.

A message that is longer than the receive it meets can't be sent, so the sender must know what was posted. Messages come
in blocks. Two blocks are posted at any time; when the last message of one was taken, the next but one is posted, with
room for the largest message so far:

    taken     | 0 1 2 3 | 4 5          a message that does not fit says so, and follows as a second one;
    posted              | 6 7 | 8 9    blocks that are posted after that have room for it
"""

FIRST_CAPACITY = 16 << 10
_BYTES_AHEAD = 4 << 20  # of the receives of one block, where these are more than one
_MOST_AHEAD = 16


class Windows:
    """One end's count of the messages of a channel."""

    def __init__(self) -> None:
        self.first = self._block(FIRST_CAPACITY)
        self._now, self._next = self.first, self.first
        self._left = self._now[0]
        self._largest = FIRST_CAPACITY

    @property
    def capacity(self) -> int:
        """Of the receive that the next message meets."""
        return self._now[1]

    def passed(self, announced: int = 0) -> tuple[int, int] | None:
        """One more message, of which the size is known where it was announced: the block, as number and capacity, that
        is to be posted now, if any is.
        """
        self._largest = max(self._largest, announced + announced // 8)
        self._left -= 1
        if self._left:
            return None
        self._now, self._next = self._next, self._block(self._largest)
        self._left = self._now[0]
        return self._next

    @staticmethod
    def _block(capacity: int) -> tuple[int, int]:
        return max(1, min(_MOST_AHEAD, _BYTES_AHEAD // capacity)), capacity
