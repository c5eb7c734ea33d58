"""Steps that are promised to have the shapes of the first one, and do not."""

import weakref
from collections.abc import Callable
from typing import Any

from gapless.errors import ConfigError
from gapless.stage import microbatch as mb


class StaticShapes:
    """Those of the batches, by program."""

    def __init__(self) -> None:
        self._first: weakref.WeakKeyDictionary[object, list[str | None]] = weakref.WeakKeyDictionary()

    def agreed(self, program: object, inputs: Any, target: Any, ask: Callable[[str], bool]) -> bool:
        """What all ranks answer before a step begins. They are asked with the fault of its batch, if it has one: a rank
        need not have all of it, and may have another one than the ranks that use theirs, so others may find none. If
        they refuse, the step was not the first one.
        """
        found = [_shapes(inputs), _shapes(target)]
        answer = ask(_fault(found, self._first.get(program, found)))
        self._first.setdefault(program, found)
        return answer


def _fault(found: list[str | None], first: list[str | None]) -> str:
    for word, now, before in zip(("inputs", "targets"), found, first, strict=True):
        if now is not None and before is not None and now != before:
            return (
                f"static_shapes=True says that all steps have the shapes of the first one, and the {word} of this one "
                f"are {now}, where they were {before}: give all steps batches of one shape (a DataLoader with "
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
