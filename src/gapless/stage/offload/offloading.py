"""What a stage keeps of a microbatch, on its way to the host's memory and back."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from gapless.stage.batch import microbatch as mb
from gapless.stage.calls import Calls
from gapless.stage.cell import Cell
from gapless.stage.saved_activations import Work

from .host_link import Link
from .saved_storages import SavedStorages


class Offloading:
    """The part of a stage that does it."""

    layers: list[Any]
    loss: Callable[[Any, Any], Tensor] | None
    _calls: Calls
    _cells: list[Cell]
    _work: dict[int, Work]

    @contextlib.contextmanager
    def saving(self, work: Work, inputs: Any) -> Iterator[None]:
        """Around a forward whose graph will leave: all but the weights, and what others hold as well."""
        given, target = mb.flatten(inputs)[0], mb.flatten(work.target)[0]
        modules = [layer for layer in (*self.layers, self.loss) if isinstance(layer, nn.Module)]
        held = (each for module in modules for each in (*module.parameters(), *module.buffers()))
        work.saved = self._calls.mode.saved = SavedStorages(given, (*given, *target, *held))
        try:
            with work.saved.during():
                yield
        finally:
            self._calls.mode.saved = None

    def offload(self, microbatch: int, link: Link) -> None:
        """The graph, or with remat the kept inputs, go to the host's memory."""
        work = self._work[microbatch]
        if work.saved is None:
            work.saved = SavedStorages([leaf for cell in self._cells for leaf in cell.kept_leaves(microbatch)], ())
            for cell in self._cells:
                cell.pack(microbatch, work.saved)
        work.saved.leave(link)

    def wait_until_gone(self, microbatch: int) -> None:
        """A host ahead of its GPU would ask for memory that a copy still holds, and get other memory."""
        saved = self._work[microbatch].saved
        assert saved is not None, "what was not offloaded can't be waited for"
        saved.wait_until_gone()

    def load(self, microbatch: int, link: Link) -> None:
        """And come back."""
        saved = self._work[microbatch].saved
        assert saved is not None, "what was not offloaded can't be loaded"
        saved.come_back(link)
        for cell in self._cells:
            cell.unpack(microbatch)

    def there(self, microbatch: int) -> Work:
        """With what was in the host's memory."""
        work = self._work[microbatch]
        if work.saved is not None:
            work.saved.wait()
        return work
