"""A model that its user has edited since the last step: where its layers go, and what can't be followed."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from torch import nn

from gapless.errors import PartitionError
from gapless.guards.whole_model import MODEL_EDITS
from gapless.model.layers import Layers
from gapless.model.uses import Uses
from gapless.pipeline.arguments.checks import check_compiled, layers_per_stage


def taken_over(before: Layers, partition: Sequence[int], now: Layers, *, movable: bool) -> tuple[int, ...]:
    """Layers per stage of an edited model, whose layers may change their stages if they are `movable`."""
    check_compiled(now.module, traced=False)
    found = followed(before.layers, partition, now.layers)
    if found is None and not movable:
        raise MODEL_EDITS.refusal(
            f"after an edit, the model has {len(now.layers)} layers in another order, so some would change their rank",
            kind=PartitionError,
        )
    return found or layers_per_stage(now, len(partition), None)


def followed(before: Sequence[Any], partition: Sequence[int], after: Sequence[Any]) -> tuple[int, ...] | None:
    """Layers per stage after an edit. Layers that are still there stay in their stages, since their parameters and
    what an optimizer keeps of them are there; a new one joins the layer before it. None where no partition does that.
    """
    stages = [stage for stage, count in enumerate(partition) for _ in range(count)]
    homes: dict[int, set[int]] = {}  # a layer may be there several times
    for layer, stage in zip(before, stages, strict=True):
        homes.setdefault(id(layer), set()).add(stage)
    if len(after) == len(before) and all(
        stage in homes.get(id(layer), {stage}) for layer, stage in zip(after, stages, strict=True)
    ):
        return tuple(partition)
    at, places = 0, []
    for layer in after:
        known = homes.get(id(layer), {at})
        at = min((stage for stage in known if stage >= at), default=min(known))
        places.append(at)
    if places != sorted(places) or set(places) != set(range(len(partition))):
        return None
    return tuple(len(list(group)) for _, group in groupby(places))


def check_stay(before: Uses, after: Uses, devices: Sequence[int], names: Mapping[nn.Parameter, str]) -> None:
    """Between ranks no parameter comes to a device that did not have it: that rank has not trained it, and its
    optimizer does not know it. `devices` has that of each stage.
    """
    for parameter, stages in after.items():
        there = {devices[stage] for stage in before.get(parameter, stages)}
        new = sorted({devices[stage] for stage in stages} - there)
        if new:
            raise MODEL_EDITS.refusal(
                f"after an edit of the model, device {new[0]} uses {names.get(parameter, 'a parameter')}, which only "
                f"device {min(there)} has trained",
                f"{MODEL_EDITS.way_out}, or load pipe.state_dict() into a new model and make a new pipeline",
                PartitionError,
            )
