"""What can be saved and goes on from what was: a pipeline with its optimizer, or a stream."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from gapless.checkpoint.contents import Contents
from gapless.checkpoint.disk import Disk
from gapless.checkpoint.opened import Opened
from gapless.checkpoint.save import begin, folder_of, met
from gapless.run.world import Gathering


class Saveable(ABC):
    """Under a mesh every rank has one and makes the same calls."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """How far it has come: the number of its checkpoint."""

    @abstractmethod
    def gathered(self, doing: str) -> AbstractContextManager[Gathering]:
        """All processes that it is in. Nothing trains meanwhile."""

    @abstractmethod
    def contents(self, gathering: Gathering, *, optimizer: Any, scheduler: Any, extra: Any) -> Contents:
        """All that this process has of it; nothing is copied."""

    @abstractmethod
    def taking(self, opened: Opened, gathering: Gathering, *, optimizer: Any, scheduler: Any) -> Callable[[], Any]:
        """Reads and checks all that this process needs, and changes nothing; what is returned puts it in place, and
        returns what the user has added.
        """

    def save(self, folder: str | Path, *, optimizer: Any = None, scheduler: Any = None, extra: Any = None) -> None:
        """A checkpoint is there, whole, or there is an error."""
        with self.gathered("saving a checkpoint") as gathering:
            made = partial(self.contents, gathering, optimizer=optimizer, scheduler=scheduler, extra=extra)
            begin(Disk(), gathering, folder_of(folder), made).finish()

    def load(self, folder: str | Path, *, optimizer: Any = None, scheduler: Any = None) -> Any:
        """Goes on from a checkpoint. Where one process can't, none of them has changed anything."""
        path = folder_of(folder)
        with self.gathered("loading a checkpoint") as gathering:
            put_in_place: Callable[[], Any] = tuple
            found = {"checkpoint": ""}  # on all ranks the same

            def taken() -> None:
                nonlocal put_in_place
                opened = Opened(path, gathering.note)
                put_in_place = self.taking(opened, gathering, optimizer=optimizer, scheduler=scheduler)
                found["checkpoint"] = opened.digest

            met(gathering, "load", path, taken, lambda: found)
        return put_in_place()
