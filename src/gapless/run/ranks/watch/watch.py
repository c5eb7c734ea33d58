"""Nobody waits for ever, and nobody leaves without a word: what goes wrong on one rank is known to all, with its place.

    raised    an exception in a step     told round the ring; the other ranks raise a short error of their own
    dead      a process that has ended   noticed at once by both neighbours in the ring: by the closed connection, and
                                         by the process itself, whose children may keep the connection open
    silent    no sign of life            after `timeout`; a long computation is no silence, its process still beats
    other     another call, or a refusal told when it lasts longer than a moment (`RollCall`)
    stuck     nobody computes            after `timeout`

Whoever learns of it keeps the first news, passes them on, and breaks off its connections, so that whatever waits here
raises. A thread that can't be reached within a grace period takes the process with it.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from gapless.errors import ConfigError, TransportError, noted_place
from gapless.guards.between_ranks import SAME_CALLS
from gapless.run.ranks.watch.blame import in_short, is_lost, may_be_lost
from gapless.run.ranks.watch.children import tell_in_child
from gapless.run.ranks.watch.leaving import Departure
from gapless.run.ranks.watch.processes import Life, dump_stacks, end_process, this_process
from gapless.run.ranks.watch.ring import Neighbour, Ring, Words, pairs
from gapless.run.ranks.watch.roll_call import RollCall
from gapless.run.ranks.watch.tally import Tally
from gapless.run.ranks.watch.whereabouts import MAKING, Whereabouts

LOG = logging.getLogger("gapless")
_LONGEST_BEAT = 1.0
_BEATS_PER_TIMEOUT = 8
_GRACE = 10.0  # seconds to end a call in, after the news
_NEWS_WITHIN = 2.0  # seconds after a connection was lost
_LOOK = 0.25  # seconds between two looks at the neighbours' processes


@dataclass(frozen=True)
class News:
    """What went wrong: how, on which rank (none if on no single one), and in words."""

    kind: str  # raised, dead, silent, other, stuck, lost
    rank: int | None
    text: str


class Watch:
    """One rank among `ranks`, which are in an order in which those that work together are neighbours."""

    def __init__(self, ranks: Sequence[int], me: int, connect: Callable[..., Any], timeout: float) -> None:
        if not timeout > 0:
            raise ConfigError(f"timeout is {timeout!r}, but it must be a number of seconds above 0")
        self.me, self.timeout, self.of = me, timeout, "pipeline"  # what this rank has made
        self.news: News | None = None
        self.whereabouts = Whereabouts(me)
        self.break_off: Callable[[], None] = lambda: None
        self.place = ""  # where this rank was when the news came
        self._since = self._closes = 0.0  # of the news, and of the end
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._told = False  # the caller knows
        self._beat = min(_LONGEST_BEAT, timeout / _BEATS_PER_TIMEOUT)
        self._awake = self._active = self._last_beat = time.monotonic()
        self._progress: object = None
        self._closing = threading.Event()
        self._ring = Ring()
        self.departure = Departure(ranks, me, self._ring)
        self.tally = Tally(self._ring)
        self.roll = RollCall(me, self._ring, lambda *words: self.tell(News(*words)))
        self._pulse = threading.Thread(target=self._live, name="gapless pulse", daemon=True)
        tell_in_child(self)
        try:
            for pair in pairs(ranks, me):
                self._connect(pair, connect)
        except BaseException:
            self.close()
            raise
        self._pulse.start()

    def _connect(self, pair: tuple[int, int], connect: Callable[..., Any]) -> None:
        number, other = pair.index(self.me), pair[1 - pair.index(self.me)]
        make = partial(connect, "ring", pair, number, timeout=self.timeout)
        lose = partial(self._bury, how=f"its connection to rank {self.me} was closed")
        try:
            neighbour = Neighbour(other, make, self._hear, lose)
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.me} can't reach rank {other} within {self.timeout:g} s: {error}"
            ) from None
        self._ring.neighbours.append(neighbour)
        neighbour.say({"process": this_process()})

    def in_child(self) -> None:
        """A forked child is no rank."""
        for neighbour in self._ring.neighbours:
            neighbour.in_child()

    # -- a call -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def call(self, doing: str, *, leaves: bool, meet: bool = True) -> Iterator[None]:
        """Around everything that all ranks do together. What is raised inside is told, or explained by what others
        told. `leaves`: here a rank leaves that was asked to; all ranks make the same calls, so all do so in the same.
        `meet`: no rank can end this call before all have begun it.
        """
        self.check()
        if meet:
            self.departure.settle(self.roll.number)
        if self.leaving and leaves:
            calls, asked_by = self.roll.number, self.departure.asked_by
            LOG.warning("rank %d leaves after %d calls: rank %d received SIGTERM", self.me, calls, asked_by)
            raise SystemExit(0)
        self.whereabouts.call = doing
        self.roll.note(doing)
        try:
            yield
            self.check()
        except BaseException as error:
            if isinstance(error, TransportError) and self.news is not None:
                raise
            if is_lost(error):
                raise self.lost_connection(None, error) from None
            if (explained := self._explained(error)) is not None:
                raise explained from error  # which may be the user's own, so its traceback stays
            if self.roll.begun:
                self.raised(error)
                self._told = True
            else:
                self.roll.refuse(self._failed(error))
            raise
        finally:
            self.whereabouts.call = ""

    def made(self) -> None:
        """The pipeline is; what neighbours believe about this rank is not to be older than that."""
        self.whereabouts.call = ""
        self._say_where()

    def check(self) -> None:
        """Raises if an earlier call has failed, on any rank."""
        if self.news is not None:
            self._known.wait(_NEWS_WITHIN)
            again = "; that closed the connections between the ranks: end all ranks, or close"
            again = f"{again} the {self.of} and make a new one on every rank" if self._told else ""
            self._told = True
            raise TransportError(f"{self.place}: {self.news.text}{again}")

    @property
    def leaving(self) -> bool:
        """No rank will begin another step."""
        return self.departure.is_due(self.roll.number)

    # -- what is told -----------------------------------------------------------------------------------------------

    def tell(self, news: News) -> None:
        """Only the first news count. From any thread; whatever waits here raises."""
        with self._lock:
            if self.news is not None:
                return
            self.place = self.whereabouts.words()
            self._since, self.news = time.monotonic(), news
        self._ring.say({"news": asdict(news)})
        if news.kind != "raised":
            LOG.error("gapless: %s: %s; what its threads were doing:", self.place, news.text)
            dump_stacks()
        self._known.set()  # only now, so that what is raised next is not printed into the middle of this
        if threading.current_thread() is self._pulse:  # which sees to it that this process ends, whatever waits here
            threading.Thread(target=self.break_off, name="gapless breaks off", daemon=True).start()
        else:
            self.break_off()

    def raised(self, error: BaseException) -> None:
        """An exception on this rank ends the step of all."""
        self.tell(News("raised", self.me, self._failed(error)))

    def _failed(self, error: BaseException) -> str:
        where = noted_place(error) or self.whereabouts.last()
        return f"rank {self.me} failed {where}: {in_short(error)} (its output has more)"

    def lost_connection(self, rank: int | None, error: BaseException) -> TransportError:
        """What is raised where something will not come. The news may be on their way."""
        words = self.whereabouts.words()
        self._known.wait(_NEWS_WITHIN)
        if self.news is None:
            left = [each for each in self._ring.neighbours if each.left is not None and rank in (each.rank, None)]
            reason = f"rank {left[0].rank} has {left[0].left}" if left else in_short(error)
            self.tell(News("lost", rank, f"{words}, and it did not come: {reason}"))
            assert self.news is not None
        self._told = True
        if words in self.news.text:
            return TransportError(self.news.text)
        return TransportError(f"{words}: {self.news.text}")

    def _explained(self, error: BaseException) -> TransportError | None:
        """What is raised instead of an error that another rank's end may have caused; None if nobody has ended. The
        others wait for news of this one meanwhile, but longer.
        """
        if not may_be_lost(error):
            return None
        self._known.wait(_NEWS_WITHIN / 4)
        ended = self.news is not None and self.news.kind in ("dead", "silent")
        return self.lost_connection(None, error) if ended else None

    # -- what is heard ----------------------------------------------------------------------------------------------

    def _hear(self, neighbour: Neighbour, words: Words) -> None:
        if "idle" in words:
            neighbour.last = words
            self._active = max(self._active, time.monotonic() - words["idle"])
        elif "news" in words:
            self.tell(News(**words["news"]))
        elif "counts" in words:
            self.tally.hear(words["counts"])
        elif "asked" in words or "leave" in words:
            self.departure.hear(words)
        elif "call" in words or "refused" in words:
            self.roll.hear(neighbour, words)
        elif "bye" in words:
            neighbour.left = words["bye"]
        elif "process" in words:
            neighbour.life = Life.found(words["process"])

    def _bury(self, neighbour: Neighbour, how: str) -> None:
        if not self._closing.is_set() and neighbour.left is None:
            text = f"rank {neighbour.rank} is dead: {how}{self._last(neighbour)}"
            self.tell(News("dead", neighbour.rank, text))

    def _last(self, neighbour: Neighbour) -> str:
        ago = time.monotonic() - neighbour.heard
        return f"; when last heard from, {ago:.1f} s ago, it was {neighbour.last.get('at', MAKING)}"

    # -- signs of life ----------------------------------------------------------------------------------------------

    def _live(self) -> None:
        while not self._closing.wait(min(self._beat, _LOOK)):
            now = time.monotonic()
            slept, self._awake = now - self._awake > 2 * self._beat + 1, now
            self._look_at_processes(now)
            if self.whereabouts.call and self.roll.number:
                self.roll.look()
            if now - self._last_beat < self._beat and not slept:
                continue
            self._last_beat = now
            if slept:  # this process itself: first it hears what was said in the meantime
                self._active = now
                for neighbour in self._ring.neighbours:
                    neighbour.heard = now
                continue
            progress = self.whereabouts.progress()
            if progress is None or progress != self._progress:
                self._active = now
            self._progress = progress
            self.departure.was_asked()
            self._say_where()
            self._look(now)

    def _say_where(self) -> None:
        self._ring.say({"idle": time.monotonic() - self._active, "at": self.whereabouts.last()}, beat=True)

    def _look_at_processes(self, now: float) -> None:
        """A process that has ended with its connection open: a child of it lives on."""
        for neighbour in self._ring.neighbours:
            if neighbour.has_ended(now):
                self._bury(neighbour, "its process has ended")

    def _look(self, now: float) -> None:
        for neighbour in self._ring.neighbours:
            if neighbour.left is None and now - neighbour.heard > self.timeout:
                text = f"rank {neighbour.rank} is silent: rank {self.me} has heard nothing for {self.timeout:g} s"
                self.tell(News("silent", neighbour.rank, text + self._last(neighbour)))
        if self.whereabouts.call and now - self._active > self.timeout:
            text = SAME_CALLS.message(f"no rank has computed anything for {self.timeout:g} s")
            self.tell(News("stuck", None, text))
        late = now - max(self._since, self._closes) > _GRACE
        if self.news is not None and late and (self.whereabouts.call or self._closes):
            dump_stacks()
            end_process(f"{self.place}: {self.news.text}; it did not come back within {_GRACE:g} s, so it ends here")

    def say_goodbye(self) -> None:
        """From now on nobody wonders where this rank is. After a failure it ends within the grace period."""
        self._closes = time.monotonic()
        error = getattr(sys, "last_value", None)
        closed = f"closed its {self.of}"
        why = SAME_CALLS.message(closed) if error is None else f"{closed} after {in_short(error)}"
        self._ring.say({"bye": why})

    def close(self) -> None:
        self._closing.set()
        if self._pulse.is_alive():
            self._pulse.join()
        for neighbour in self._ring.neighbours:
            neighbour.close()
        self.departure.close()
