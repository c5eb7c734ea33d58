"""Which stages use a parameter or have a buffer, and what several of them share."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gapless.errors import PartitionError
from gapless.guards.weights_and_gradients import SECOND_USES, WEIGHTS_ELSEWHERE
from gapless.stage.compiled import is_traced
from gapless.stage.guards.changing_buffers import Owned
from gapless.stage.shared.tie import Away, Place, Tie, Tied
from gapless.stage.stage import Stage

Uses = dict[nn.Parameter, list[int]]  # the stages that use a parameter, in their order


def uses_of(stages: Sequence[Sequence[Any]]) -> Uses:
    """For each stage what it calls: its layers and, for the last one, the loss."""
    uses: Uses = {}
    for number, parts in enumerate(stages):
        found = [parameter for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()]
        for parameter in dict.fromkeys(found):
            uses.setdefault(parameter, []).append(number)
    return uses


def own_parameters(loss: Any, module: nn.Module) -> list[nn.Parameter]:
    """Those of a loss that are not the model's."""
    known = set(module.parameters()) if isinstance(loss, nn.Module) else set()
    return [each for each in loss.parameters() if each not in known] if isinstance(loss, nn.Module) else []


def shared_buffers(module: nn.Module, stages: Sequence[Sequence[Any]]) -> dict[Owned, str]:
    """The buffers that layers of several stages have, with their names. A traced graph is never cut between two uses of
    a buffer that changes, so its buffers are left out.
    """
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    users: dict[int, set[int]] = {}
    owned: dict[Owned, int] = {}
    for number, parts in enumerate(stages):
        whole = [part for part in parts if isinstance(part, nn.Module) and not is_traced(part)]
        for owner in (each for part in whole for each in part.modules()):
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owned[owner, name] = id(buffer)
                    users.setdefault(id(buffer), set()).add(number)
    return {each: names.get(buffer, each[1]) for each, buffer in owned.items() if len(users[buffer]) > 1}


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
    nobodys: dict[nn.Parameter, list[Place]] = {}  # where those that no module has were seen
    lock = threading.Lock()

    def stray(place: Place, parameter: torch.Tensor, late: bool) -> None:
        """A place uses it though no module there has it: a penalty on all weights in the loss, a function that takes a
        weight from outside. A forward shows that, before its backward, and it is tied then. `late`: autocast has cast
        weights for earlier microbatches of the step.
        """
        assert isinstance(parameter, nn.Parameter)
        with lock:
            known = next((each for each in ties if each.parameter is parameter), None)
            owners = uses.get(parameter, [])
            if absent := [stage for stage in owners if stage not in stages]:
                raise WEIGHTS_ELSEWHERE.refusal(
                    f"stage {place[0]} uses the parameter {names.get(parameter, 'of another layer')}, which belongs "
                    f"to stage {absent[0]} in another process, and its values are not here"
                )
            if known is None:
                seen = nobodys.setdefault(parameter, [])
                if not owners and not seen:
                    seen.append(place)
                    return
                known = Tie(names.get(parameter, "a parameter"), parameter, [], tied)
                for stage in owners:
                    stages[stage].join(known)
                for stage, cell in seen:
                    stages[stage].join(known, cell)
                ties.append(known)
                stages[place[0]].join(known, place[1])
                known.begin()
            else:
                stages[place[0]].join(known, place[1])
            if any(stages[stage].has_deferred(parameter) for stage in known.followers):
                known.hold()
                stages[known.stages[0]].exclude(parameter)
            for stage in known.followers:
                stages[stage].exclude(parameter)
            if late and any(stages[stage].split for stage in known.stages):
                raise SECOND_USES.refusal(
                    f"under autocast, stage {place[0]} uses {known.name}, which belongs to another stage, in some "
                    "microbatches only, and a split backward would cast its gradient elsewhere than plain training"
                )

    for number, stage in stages.items():
        stage.tie(number, [each for each in ties if number in each.stages], stray)
    return ties
