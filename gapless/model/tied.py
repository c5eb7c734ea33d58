"""Which parameters several stages share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gapless.errors import PartitionError
from gapless.stage.stage import Stage
from gapless.stage.tie import Tie, Tied


def tie(module: nn.Module, stages: Sequence[Stage], devices: Sequence[torch.device], tied: Tied) -> list[Tie]:
    """Ties the parameters that are used in more than one of the stages; `devices` has that of each stage."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    users: dict[nn.Parameter, list[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.parameters():
            users.setdefault(parameter, []).append(number)
    ties: list[Tie] = []
    for parameter, numbers in users.items():
        if len(numbers) < 2:
            continue
        name = names.get(parameter, "a parameter")
        if len({devices[number] for number in numbers}) > 1:
            raise PartitionError(
                f"stages {', '.join(map(str, numbers))} share the parameter {name}, and are on different devices: "
                "choose a partition or placement that keeps its uses on one device, or give each its own"
            )
        ties.append(Tie(name, parameter, numbers, tied))
    for number, stage in enumerate(stages):
        stage.tie(number, [each for each in ties if number in users[each.parameter]])
    return ties
