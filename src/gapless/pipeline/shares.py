"""An update that takes several minibatches: what each of them counts in it, with what other replicas have of it.

The mean of all is the sum of their means, each times its share of what the mean is over. Replicas cut each minibatch
among themselves, and a loss may leave out more targets of one than of another; so the shares are those of the whole.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

from gapless.errors import ConfigError
from gapless.pipeline.staged_model import StagedModel
from gapless.run.world import World
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.minibatch import apart


def shares_of(
    world: World,
    staged: StagedModel,
    batches: Sequence[tuple[Any, Any]],
    call: Callable[[], AbstractContextManager[object]],
) -> list[float | Fraction]:
    """Exact, so that a microbatch has the weight that the plain loop over all of them gives it. `call` is around what
    all ranks do together.
    """
    pairs = isinstance(batches, Sequence) and all(isinstance(each, tuple | list) and len(each) == 2 for each in batches)
    if not pairs or not batches:
        raise ConfigError(
            "shares takes the minibatches of an update as a list of (inputs, target), of one at least; the target is "
            "None where the model has a loss of its own"
        )
    with call():
        found = [_weighed(staged, inputs, target) for inputs, target in batches]
        rows = world.of_replicas([number for each in found for number in (each.kept, sum(each.numbers))])
    first = found[0]
    if first.summed:
        return [1.0] * len(batches)
    first.check_kept([kept for row in rows for kept in row[::2]])
    counts = [sum(map(Fraction, each), Fraction(0)) for each in zip(*(row[1::2] for row in rows), strict=True)]
    total = sum(counts)
    return [each / total if total else 0.0 for each in counts]


def _weighed(staged: StagedModel, inputs: Any, target: Any) -> Weighed:
    batch = staged.batch_of(inputs, target, cut=True)
    return staged.weighed(batch, staged.prepared([apart(part) for part in batch.parts]))
