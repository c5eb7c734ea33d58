"""Batches of the steps of a program, each compared with the first."""

from typing import Any

import pytest
import torch

from gapless.errors import ConfigError, GaplessError
from gapless.run.ranks.wire.static_shapes import PLAY, REHEARSE, SPEAK, StaticShapes

EIGHT, FIVE, TARGET = torch.zeros(8, 4), torch.zeros(5, 4), torch.zeros(8, dtype=torch.int64)


class Program:
    """Any."""


ROUTINE: Any = {"rehearsed": True, "follows": True}


def alone(fault: GaplessError | None, ready: int) -> int:
    if fault is not None:
        raise fault
    return ready


def never(fault: GaplessError | None, ready: int) -> int:
    raise ConfigError(f"another rank refuses; this one says {fault!r}")


def test_a_batch_of_another_shape_is_named() -> None:
    shapes, program, another = StaticShapes(), Program(), Program()
    assert shapes.agreed(program, EIGHT, None, alone, **ROUTINE)
    assert shapes.agreed(program, EIGHT, TARGET, alone, **ROUTINE)  # a part that was not there is not compared
    assert shapes.agreed(another, FIVE, TARGET, alone, **ROUTINE)
    with pytest.raises(
        ConfigError, match=r"inputs of this one are float32 \[5, 4\], where they were float32 \[8, 4\]: "
    ):
        shapes.agreed(program, FIVE, TARGET, alone, **ROUTINE)
    with pytest.raises(ConfigError, match=r"targets of this one are float32 \[8, 4\], where they were int64 \[8\]: "):
        shapes.agreed(another, FIVE, EIGHT, alone, **ROUTINE)


def test_a_step_that_was_refused_was_not_the_first() -> None:
    """A rank has made its program anew, and the batch that it takes for the first is refused by the others."""
    shapes, program = StaticShapes(), Program()
    with pytest.raises(ConfigError, match="this one says None"):
        shapes.agreed(program, FIVE, None, never, **ROUTINE)
    assert shapes.agreed(program, EIGHT, None, alone, **ROUTINE)


def test_shapes_that_nobody_has_promised_are_rehearsed_when_they_come_again() -> None:
    shapes, program = StaticShapes(promised=False), Program()

    def next_step(batch: Any, *, rehearsed: bool, follows: bool = True, others: int = PLAY) -> int:
        def ask(fault: GaplessError | None, ready: int) -> int:
            assert fault is None
            return min(ready, others)

        return shapes.agreed(program, batch, TARGET, ask, rehearsed=rehearsed, follows=follows)

    assert next_step(EIGHT, rehearsed=False, follows=False) == SPEAK  # nothing is known of the layers
    assert next_step(EIGHT, rehearsed=False) == REHEARSE
    assert next_step(EIGHT, rehearsed=True) == PLAY
    assert next_step(FIVE, rehearsed=True) == SPEAK  # the last batch of an epoch
    assert next_step(EIGHT, rehearsed=True) == SPEAK
    assert next_step(EIGHT, rehearsed=True) == PLAY
    assert next_step(FIVE, rehearsed=True) == SPEAK
    assert next_step(FIVE, rehearsed=True) == REHEARSE  # it stays
    assert next_step(FIVE, rehearsed=True) == PLAY
    assert next_step(FIVE, rehearsed=True, others=REHEARSE) == REHEARSE  # a rank has made its program anew
    assert next_step(FIVE, rehearsed=True, follows=False) == SPEAK
