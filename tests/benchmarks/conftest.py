"""Benchmarks start the ranks of a peer with a launcher of their own. Here they share that of all tests, which has torch
already; `tests/benchmarks/peer` has those that start one.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.peer.launcher import Launcher


class SharedLauncher(Launcher):
    """Ranks from a launcher that is there, and stays when this one is closed."""

    def __init__(self, launcher: Launcher, *modules: str) -> None:
        self._launcher, self._modules, self._pids = launcher, modules, list[int]()

    def start(
        self, function: Callable[..., object], ranks: int, *words: str, said: Sequence[Path], imports: str = ""
    ) -> list[int]:
        pids = self._launcher.start(function, ranks, *words, said=said, imports=imports or self._modules[-1])
        self._pids += pids
        return pids

    def statuses(self, pids: Iterable[int]) -> dict[int, int]:
        return self._launcher.statuses(pids)

    def end(self, pids: Iterable[int]) -> None:
        self._launcher.end(pids)

    def close(self) -> None:
        self.end(self._pids)


@pytest.fixture
def shared_launcher(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*modules: str, environment: Mapping[str, str] | None = None) -> Launcher:
        assert environment is None
        return SharedLauncher(launcher, *modules)

    monkeypatch.setattr("benchmarks.peer.peer.Launcher", make)
