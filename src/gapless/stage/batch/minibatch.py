"""What a caller gives to a step or an evaluation, cut into microbatches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.errors import ConfigError

from . import microbatch as mb


@dataclass(frozen=True)
class Minibatch:
    """The inputs and targets of the microbatches, and their sizes; a rank that has no use for some has None there."""

    inputs: Any
    target: Any
    parts: Sequence[Any]
    targets: Sequence[Any]
    sizes: Sequence[int]
    is_cut: bool = True

    @classmethod
    def cut(
        cls, inputs: Any, target: Any, microbatches: int, batch_dims: Any, target_dims: Any, *, needed: bool = True
    ) -> "Minibatch":
        """`needed`: this process uses the inputs, whatever is in them."""
        size = mb.samples(inputs, target, batch_dims)
        count = min(size, microbatches)
        parts: list[Any] = [None] * count
        if needed or size == 0 or target is None:
            parts = mb.split(inputs, microbatches, batch_dims)
        targets: list[Any] = [None] * count
        if target is not None:
            targets = mb.split(target, count, target_dims, size=size)
        return cls(inputs, target, parts, targets, mb.sizes(size, count))

    @classmethod
    def given(
        cls, inputs: Any, target: Any, microbatches: int, batch_dims: Any, *, weighed: bool = False
    ) -> "Minibatch":
        """Of microbatches that the caller has made, each with shapes of its own; at most so many. `weighed`: it matters
        little how many samples they have, since somebody tells what they count.
        """
        for word, value in (("inputs", inputs), ("target", target)):
            if not (isinstance(value, list) or (value is None and word == "target")):
                raise ConfigError(
                    f"with cut=False {word} is a list of microbatches, but it is a {type(value).__name__}"
                )
        if not 1 <= len(inputs) <= microbatches:
            raise ConfigError(
                f"{len(inputs)} microbatches were given, but there must be 1 to {microbatches}: make the pipeline with "
                "microbatches= for the most that may come"
            )
        if target is not None and len(target) != len(inputs):
            raise ConfigError(
                f"the number of microbatches is {len(inputs)}, and of targets {len(target)}: give one for each"
            )
        parts = [mb.as_dict(part) for part in inputs]
        goals = [None] * len(parts) if target is None else target
        sizes = [
            mb.batch_size(part, batch_dims) if weighed else mb.samples(part, goal, batch_dims)
            for part, goal in zip(parts, goals, strict=True)
        ]
        if 0 in sizes:
            raise ConfigError(f"microbatch {sizes.index(0)} is empty (0 samples): leave it out")
        targets = [None] * len(parts) if target is None else [mb.as_dict(each) for each in target]
        return cls(parts, None if target is None else targets, parts, targets, sizes, is_cut=False)

    @property
    def counted(self) -> list[Any]:
        """What tells how much microbatches count, as it came: targets or, where there are none, inputs."""
        whole = self.inputs if self.target is None else self.target
        return [whole] if self.is_cut else whole

    def merged(self, outputs: Sequence[Any], whole: Mapping[int, Any] | None = None) -> Any:
        """Of all microbatches as one tree, as `merge` says; or a list, where microbatches came as one."""
        return mb.merge(outputs, self.sizes, whole) if self.is_cut else list(outputs)


def apart(part: Any) -> Any:
    """Microbatches are views of one tensor and share its version counter: a layer that changes its input in place
    would make torch believe that those of all other microbatches have changed.
    """
    if part is None:
        return None
    tensors, shape = mb.flatten(part)
    return mb.unflatten([tensor.data.requires_grad_(tensor.requires_grad) for tensor in tensors], shape)
