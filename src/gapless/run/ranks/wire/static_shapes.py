"""Steps that are promised to have the shapes of the first one, and do not."""

import weakref
from typing import Any

from gapless.errors import ConfigError
from gapless.stage import microbatch as mb


class StaticShapes:
    """Those of the batches, by program."""

    def __init__(self) -> None:
        self._first: weakref.WeakKeyDictionary[object, list[str | None]] = weakref.WeakKeyDictionary()

    def fault(self, program: object, inputs: Any, target: Any) -> str:
        """Of a step that is about to begin, in words if there is one. A rank need not have all of the batch, and may
        have another one than the ranks that use theirs, so others may find no fault.
        """
        found = [_shapes(inputs), _shapes(target)]
        for word, now, first in zip(("inputs", "targets"), found, self._first.setdefault(program, found), strict=True):
            if now is not None and first is not None and now != first:
                return (
                    f"static_shapes=True says that all steps have the shapes of the first one, and the {word} of this "
                    f"one are {now}, where they were {first}: give all steps batches of one shape (a DataLoader with "
                    "drop_last=True does), or leave out static_shapes"
                )
        return ""


def another_shape(tree: Any) -> ConfigError:
    """What a stage has made is not what it made in the first step, though its inputs are alike."""
    return ConfigError(
        "static_shapes=True says that all steps have the shapes of the first one, and a stage has now made "
        f"{_shapes(tree)}, which it had not at this place of the first step: leave out static_shapes (strides, "
        "constants and what wants a gradient have to be the same, too)"
    )


def _shapes(tree: Any) -> str | None:
    if tree is None:
        return None
    tensors, _ = mb.flatten(tree)
    return ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors) or "no tensor"
