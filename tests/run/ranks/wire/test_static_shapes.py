"""Batches of the steps of a program, each compared with the first."""

import pytest
import torch

from gapless.errors import ConfigError, GaplessError
from gapless.run.ranks.wire.static_shapes import StaticShapes

EIGHT, FIVE, TARGET = torch.zeros(8, 4), torch.zeros(5, 4), torch.zeros(8, dtype=torch.int64)


class Program:
    """Any."""


def alone(fault: GaplessError | None) -> bool:
    if fault is not None:
        raise fault
    return True


def never(fault: GaplessError | None) -> bool:
    raise ConfigError(f"another rank refuses; this one says {fault!r}")


def test_a_batch_of_another_shape_is_named() -> None:
    shapes, program, another = StaticShapes(), Program(), Program()
    assert shapes.agreed(program, EIGHT, None, alone)
    assert shapes.agreed(program, EIGHT, TARGET, alone)  # a part that was not there is not compared
    assert shapes.agreed(another, FIVE, TARGET, alone)
    with pytest.raises(
        ConfigError, match=r"inputs of this one are float32 \[5, 4\], where they were float32 \[8, 4\]: "
    ):
        shapes.agreed(program, FIVE, TARGET, alone)
    with pytest.raises(ConfigError, match=r"targets of this one are float32 \[8, 4\], where they were int64 \[8\]: "):
        shapes.agreed(another, FIVE, EIGHT, alone)


def test_a_step_that_was_refused_was_not_the_first() -> None:
    """A rank has made its program anew, and the batch that it takes for the first is refused by the others."""
    shapes, program = StaticShapes(), Program()
    with pytest.raises(ConfigError, match="this one says None"):
        shapes.agreed(program, FIVE, None, never)
    assert shapes.agreed(program, EIGHT, None, alone)
