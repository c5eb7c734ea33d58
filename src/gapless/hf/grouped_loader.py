"""A loader whose batches come several at a time: a pipeline evaluates as many at once as it has microbatches."""

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.utils.operations import find_batch_size


class GroupedLoader:
    """As the loader, but `before` is called with each group of batches before the first of them is handed out.

    Accelerate's loader says at its last batch that it ends, and Trainer then drops what it counted too much. So the
    word is kept back until that batch is handed out here.
    """

    def __init__(self, loader: Any, most: int, before: Callable[[list[Any]], None]) -> None:
        self._loader, self._most, self._before = loader, most, before

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while group := self._group(batches):
            ends = self._ends
            self._before(group)
            for number, batch in enumerate(group, 1):
                if ends:
                    self._loader.end_of_dataloader = number == len(group)
                    if self._loader.remainder == -1:  # nobody has counted the samples
                        self._loader.remainder = find_batch_size(group[-1])
                yield batch

    def _group(self, batches: Iterator[Any]) -> list[Any]:
        group: list[Any] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self._most or self._ends:
                break
        return group

    @property
    def _ends(self) -> bool:
        return bool(getattr(self._loader, "end_of_dataloader", False))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
