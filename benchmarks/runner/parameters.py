"""The options that several benchmarks have. A benchmark declares its options as the parameters of its `run`: the type
says how an option is read, the default is the option's default, and the text beside the type is its help.

    int               a whole number from 1 on
    float             a number in the `Between` that stands beside the type
    bool              a switch: --name where the default is False, --no-name where it is True
    tuple[str, ...]   words with commas between them
    Path | None       a file to write
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from gapless.errors import ConfigError
from gapless.schedule.recipes import find_recipe


@dataclass(frozen=True)
class Between:
    """The least and the greatest value that an option takes."""

    least: float
    most: float


Devices = Annotated[int, "devices"]
Microbatches = Annotated[int, "microbatches"]
Milliseconds = Annotated[float, "time of each F, I and W of a device", Between(0.001, 60_000)]
Rounds = Annotated[int, "number of rounds; the median counts"]
Steps = Annotated[int, "steps in a round"]
Schedule = Annotated[str, "schedule to measure", find_recipe]
Schedules = Annotated[tuple[str, ...], "schedules to measure", find_recipe]


def check_width(width: int, heads: int = 4) -> None:
    """Of a model whose heads share it."""
    if width % heads:
        raise ConfigError(f"width is {width}, but it must be a multiple of {heads}, the number of heads")


def numbers(name: str, values: Sequence[str], *, whole: bool = True) -> list[float]:
    """Of an option that is a list of them."""
    try:
        found = [float(value) for value in values]
    except ValueError:
        found = []
    if not found or not all(0 < value < float("inf") for value in found) or (whole and any(v % 1 for v in found)):
        raise ConfigError(
            f"--{name} {','.join(values)[:40]} is not a list of numbers above 0, with commas between them"
        )
    return found
