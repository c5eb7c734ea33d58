"""What can be saved and goes on from what was: a pipeline with its optimizer, or a stream; and a checkpoint on disk, to
be read.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gapless.checkpoint.contents import Contents
from gapless.checkpoint.disk import Disk
from gapless.checkpoint.manifest import TensorEntry, check_files, read_manifest
from gapless.checkpoint.pieces import read_tensor
from gapless.checkpoint.save import begin, folder_of, met
from gapless.checkpoint.tree import Json, decode, tensors_in
from gapless.errors import CheckpointError, printable
from gapless.run.world import Gathering


class Opened:
    """Its manifest is read and its files are there. What is read of them is compared with its hash."""

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda _: None) -> None:
        self.folder, self._note = folder, note
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest)
        self.digest = hashlib.sha256(self.manifest.text()).hexdigest()  # ranks that see different ones are told

    @property
    def shown(self) -> str:
        """Its path, for errors."""
        return printable(self.folder)

    def tree(self, name: str) -> Json:
        """As it was encoded; None where it has none."""
        return self.manifest.trees.get(name)

    def value(self, name: str) -> Any:
        """A tree with its tensors."""
        return self.decoded(self.tree(name))

    def decoded(self, tree: Json, into: Any = None, get: Callable[[str], Tensor] | None = None) -> Any:
        """With its tensors, which `get` reads if it is given."""
        return decode(tree, get or (lambda name: self.tensor(name, into)))

    def entry(self, tree: Json) -> TensorEntry | None:
        """Of a tree that is one tensor."""
        names = list(tensors_in(tree)) if isinstance(tree, dict) and list(tree) == ["$tensor"] else []
        return self.manifest.tensors.get(names[0]) if names else None

    def tensor(self, name: str, into: Any = None) -> Tensor:
        """A whole one, or for a DTensor the block that is here."""
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.shown} has no tensor {printable(name)}: its manifest makes no sense")
        self._note(f"reading {name}")
        return read_tensor(self.folder, name, entry, into)


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
