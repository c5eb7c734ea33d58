"""What the devices of one process tell each other about steps that are under way."""

import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gapless.run.channels import StoppedError
from gapless.run.lanes import await_computed, computed
from gapless.run.overlap.verdict import Check, Findings, Verdict


class NoticeBoard:
    """What threads wait for, by name; once it is stopped nobody waits any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: dict[Any, Any] = {}
        self.stopped = False

    def post(self, key: Any, value: Any = None) -> None:
        with self._changed:
            self._there[key] = value
            self._changed.notify_all()

    def add(self, key: Any, value: Any = None) -> list[Any]:
        """One more of what several threads say: all so far."""
        with self._changed:
            self._there.setdefault(key, []).append(value)
            return list(self._there[key])

    def wait(self, key: Any) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self.stopped or key in self._there)
            if key not in self._there:
                raise StoppedError
            return self._there[key]

    def has(self, key: Any) -> bool:
        return key in self._there

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Nobody waits, and others may."""
        self._there, self.stopped = {}, False

    def forget(self, step: int) -> None:
        """All that is about one step; keys are pairs with it."""
        with self._changed:
            self._there = {key: value for key, value in self._there.items() if key[1] != step}


class ThreadCourt:
    """The devices of one process. On GPUs, each reads what others have computed only when it is there."""

    def __init__(self, check: Check, devices: int, board: NoticeBoard) -> None:
        self.check, self._devices, self._board = check, devices, board

    def tell(self, step: int, norms: Mapping[int, Tensor], told: Findings) -> None:
        by_device = self._board.add(("norms", step), (norms, told, computed(norms.values())))
        if len(by_device) == self._devices:
            found: dict[int, Tensor] = {}
            for each, _, when in by_device:
                await_computed(each.values(), when)
                found |= each
            together = Findings(*map(any, zip(*(each for _, each, _ in by_device), strict=True)))
            verdict = self.check.verdict([found[number] for number in sorted(found)], together)
            self._board.post(("verdict", step), (verdict, computed(verdict.tensors)))

    def verdict(self, step: int) -> Verdict:
        found: Verdict
        found, when = self._board.wait(("verdict", step))
        await_computed(found.tensors, when)
        return found
