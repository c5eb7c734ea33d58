"""The rules of updates that a schedule writes out: every stage has one per minibatch, where its gradients are, and
before those of the next minibatch join them.

    0: 0F0 0B0 0U0 0F2 0B2 0U2        stage 0 is on devices 0 and 1, and a minibatch is one microbatch here: 0U1
    1: 0F1 0B1 0U1 0F3 0B3 0U3        is on device 1, which ran microbatch 1, and before the gradient of 0B3
"""

from collections.abc import Iterator, Mapping

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.dependencies import microbatches_of
from gapless.schedule.violation import Violation
from gapless.units import show_count

WEIGHT_GRADIENTS = frozenset({Kind.BACKWARD, Kind.WEIGHT_GRAD})  # the two that add to what an update takes


def missing_updates(schedule: Schedule, places: Mapping[Action, tuple[int, int]]) -> Iterator[Violation]:
    """Every stage has one per minibatch, and all minibatches have the same size."""
    if schedule.num_microbatches % schedule.num_minibatches:
        action = next(action for action in places if action.kind is Kind.UPDATE)
        message = (
            f"{show_count(schedule.num_microbatches, 'microbatch')} can't be shared by updates 0 to "
            f"{schedule.num_minibatches - 1}: each minibatch has as many as the others"
        )
        yield Violation("complete", *places[action], message)
    for stage, cycle in enumerate(schedule.placement.cycles):
        for minibatch in range(schedule.num_minibatches):
            action = Action(stage, Kind.UPDATE, minibatch)
            if action not in places:
                last = max(microbatches_of(minibatch, schedule), default=0)
                device = cycle[last % len(cycle)]
                yield Violation("complete", device, len(schedule.rows[device]), f"{action} is missing")


def updates_out_of_order(schedule: Schedule) -> Iterator[Violation]:
    """A device adds up a stage's gradients in one place, and an update takes what is there: that of its minibatch only
    if no later minibatch has added to it, and the minibatches come in order.
    """
    per_minibatch = max(1, schedule.num_microbatches // schedule.num_minibatches)
    for device, row in enumerate(schedule.rows):
        updated: dict[int, Action] = {}  # by stage, the last one
        added: dict[int, Action] = {}  # by stage, the weight gradient of the latest microbatch
        for position, action in enumerate(row):
            stage, kind, number = action
            if kind in WEIGHT_GRADIENTS:
                if stage not in added or number > added[stage].microbatch:
                    added[stage] = action
            elif kind is Kind.UPDATE:
                before, latest = updated.get(stage), added.get(stage)
                if before is not None and number < before.microbatch:
                    message = f"{action} comes after {before}, but a stage is updated in the order of its minibatches"
                    yield Violation("order", device, position, message)
                elif latest is not None and latest.microbatch // per_minibatch > number:
                    message = (
                        f"{action} comes after {latest}, so the gradient of minibatch "
                        f"{latest.microbatch // per_minibatch} would be in the update of minibatch {number}"
                    )
                    yield Violation("order", device, position, message)
                updated[stage] = action if before is None or number > before.microbatch else before


def lacking(device: int, stage: int, minibatch: int, schedule: Schedule) -> str | None:
    """Why an update is not possible on a device: its gradients are where the microbatches of its minibatch ran.

    Those of one minibatch may be on several replicas, which the update waits for. Where another minibatch follows they
    may not: it would add to what the update has not yet taken from the other replicas.
    """
    placement = schedule.placement
    if stage not in placement.stages[device]:
        return f"which does not hold stage {stage}"
    microbatches = microbatches_of(minibatch, schedule)
    homes = sorted({placement.device(stage, m) for m in microbatches})
    if not homes or (device in homes and (len(homes) == 1 or schedule.num_minibatches == 1)):
        return None
    first, last = microbatches[0], microbatches[-1]
    many = f"microbatch {first}" if first == last else f"microbatches {first} to {last}"
    where = f"device{'s' if len(homes) > 1 else ''} {' and '.join(map(str, homes))}"
    only = ": of several minibatches each is on one device" if device in homes else ""
    return f"but stage {stage} has {many}, whose gradient it takes, on {where}{only}"
