"""Ranks that disagree would wait for each other for ever, or train something that nobody asked for: they are refused
before they exchange a tensor.

    first rank    facts -> store                                   all have met, or somebody objects
    other ranks   store -> compare with their own -> objection?    the same words on every rank

Facts are plain: numbers, strings, and lists and mappings of these, as JSON.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.errors import TransportError
from gapless.guards.between_ranks import SAME_CALLS
from gapless.run.ranks.wire.call_stamp import disagreement

_OFTEN = 0.005  # seconds between two looks, at first
_SELDOM = 0.1


class Agreement:
    """The ranks of a mesh, and a part of the store that is theirs alone."""

    def __init__(self, store: Any, ranks: Sequence[int], me: int, timeout: float) -> None:
        self._store, self._ranks, self._me, self._timeout = store, ranks, me, timeout
        self._times = 0
        self.refused = False

    def reach(self, facts: Mapping[str, Any], check: Callable[[], None]) -> None:
        """Returns when all ranks have given the same facts. `check` raises where one of them will never come."""
        try:
            self._reach(facts, check)
        except RuntimeError as error:
            raise TransportError(
                "the ranks have lost the store they meet in, since the process that held it has ended (rank 0 or "
                f"torchrun's agent): {str(error).splitlines()[0]}"
            ) from None

    def _reach(self, facts: Mapping[str, Any], check: Callable[[], None]) -> None:
        self._times += 1
        first = min(self._ranks)
        here = f"{self._times}/"
        if self._me == first:
            self._store.set(here + "facts", json.dumps(facts))
        else:
            self._wait(lambda: self._there(here + "facts"), here, check)
            theirs = json.loads(self._store.get(here + "facts"))
            found = disagreement(theirs, json.loads(json.dumps(facts)), first, self._me)
            if found and self._store.add(here + "objections", 1) == 1:
                self._store.set(here + "objection", found)
        self._store.set(f"{here}met/{self._me}", "")
        if self._store.add(here + "met", 1) < len(self._ranks):
            self._wait(lambda: self._store.add(here + "met", 0) == len(self._ranks), here, check)
        self._refuse(here)

    def _wait(self, over: Callable[[], bool], here: str, check: Callable[[], None]) -> None:
        pause, waited, last = _OFTEN, 0.0, time.monotonic()
        while not over():
            self._refuse(here)
            check()
            now = time.monotonic()
            waited, last = waited + min(now - last, 1.0), now  # if this process sleeps, so may all others
            if waited > self._timeout:
                missing = [rank for rank in self._ranks if not self._there(f"{here}met/{rank}") and rank != self._me]
                raise TransportError(
                    f"rank {self._me} has waited {self._timeout:g} s for rank {', '.join(map(str, missing))} to make "
                    "the same pipeline: do all ranks get there, and is timeout= long enough?"
                )
            time.sleep(pause)
            pause = min(2 * pause, _SELDOM)

    def _refuse(self, here: str) -> None:
        if self._there(here + "objections"):
            while not self._there(here + "objection"):
                time.sleep(_OFTEN)
            self.refused = True
            raise SAME_CALLS.refusal(self._store.get(here + "objection").decode(), "")

    def _there(self, key: str) -> bool:
        return bool(self._store.check([key]))
