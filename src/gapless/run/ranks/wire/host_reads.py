"""Whether the host asks a GPU for numbers during a step. Shapes can depend on data only where it does."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

_SAID = "called a synchronizing CUDA operation"
_OF_THE_MODE = "Synchronization debug mode is a prototype"


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """What torch says of them, complete when it ends. A mode of the user's is left as it is, and nothing is known."""
    found: list[str] = []
    if torch.cuda.get_sync_debug_mode():
        found.append("a sync debug mode is on")
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for each in caught:
        if _SAID in str(each.message):
            found.append(f"{each.filename}:{each.lineno}")
        elif _OF_THE_MODE not in str(each.message):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)
