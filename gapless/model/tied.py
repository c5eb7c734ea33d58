"""Which parameters several stages share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gapless.errors import PartitionError
from gapless.stage.stage import Stage
from gapless.stage.tie import Away, Tie, Tied

Uses = dict[nn.Parameter, list[int]]  # the stages that use a parameter, in their order


def uses_of(stages: Sequence[Sequence[Any]]) -> Uses:
    """For each stage what it calls: its layers and, for the last one, the loss."""
    uses: Uses = {}
    for number, parts in enumerate(stages):
        found = [parameter for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()]
        for parameter in dict.fromkeys(found):
            uses.setdefault(parameter, []).append(number)
    return uses


def tie(
    module: nn.Module,
    stages: Mapping[int, Stage],
    uses: Uses,
    devices: Sequence[torch.device],
    tied: Tied,
    away: Callable[[int, Sequence[int]], Away | None] = lambda number, stages: None,
) -> list[Tie]:
    """Ties the parameters that are used in more than one stage; `devices` has that of each. `stages` are those of this
    process, and `away` gives the way to the others, for the `number`-th shared parameter and the stages that use it.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    shared = [(parameter, numbers) for parameter, numbers in uses.items() if len(numbers) > 1]
    ties: list[Tie] = []
    for count, (parameter, numbers) in enumerate(shared):
        name = names.get(parameter, "a parameter")
        if len({devices[number] for number in numbers}) > 1:
            raise PartitionError(
                f"stages {', '.join(map(str, numbers))} share the parameter {name}, and are on different devices: "
                "choose a partition or placement that keeps its uses on one device, or give each its own"
            )
        if any(number in stages for number in numbers):
            ties.append(Tie(name, parameter, numbers, tied, away(count, numbers)))
    for number, stage in stages.items():
        stage.tie(number, [each for each in ties if number in each.stages])
    return ties
