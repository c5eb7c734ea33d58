"""A checkpoint on disk, to be read."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from gapless.checkpoint.manifest import TensorEntry, check_files, read_manifest
from gapless.checkpoint.pieces import read_tensor
from gapless.checkpoint.tree import Json, decode, tensors_in
from gapless.errors import CheckpointError, printable


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
        return printable(str(self.folder))

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
