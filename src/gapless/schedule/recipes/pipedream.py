"""Recipes without a flush: pipedream and 2bw. Updates are part of the schedule, and the pipeline never drains.

Letters: K devices, M microbatches, r = device 0..K-1, R_s replicas of stage s, R in all.
"""

from collections.abc import Sequence

from gapless.errors import ScheduleError
from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import line, replicated
from gapless.schedule.recipes.head_start import forwards_ahead, one_ahead_of_each
from gapless.units import show_count


def pipedream(num_devices: int, num_microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """PipeDream: after its warm-up of floor((R-1 - sum of R_i before s) / R_s) F a device runs [F B U] for ever.

    M counts minibatches here, each of one microbatch; a replica takes every R_s-th. A B uses the weights its F saw.

    0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
    """
    replicas = [1] * num_devices if replicas is None else list(replicas)
    if min(replicas, default=0) < 1 or sum(replicas) != num_devices:
        raise ScheduleError(
            f"replicas {','.join(map(str, replicas))} use {show_count(sum(replicas), 'device')}, but there are "
            f"{num_devices}: give one number of at least 1 per stage, in all as many as there are devices"
        )
    return _flow("pipedream", replicas, num_microbatches)


def two_buffered_weights(num_devices: int, num_microbatches: int, minibatches: int = 8) -> Schedule:
    """PipeDream-2BW: 1f1b that runs on from one minibatch into the next, with one update per M microbatches.

    Two versions of the weights are enough as long as M >= K: the delay is one minibatch, always.

    0: 0F0 0F1 0B0 0F2 0B1 0U0 0F3 0B2 0B3 0U1
    1: 1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1
    """
    K, M = num_devices, num_microbatches
    if M < K:
        raise ScheduleError(
            f"2bw needs at least as many microbatches as devices, but M = {M} < K = {K}: two versions of the "
            "weights are not enough"
        )
    return _flow("2bw", [1] * K, minibatches, M)


def _flow(name: str, replicas: Sequence[int], minibatches: int, microbatches: int = 1) -> Schedule:
    """Every device is some forwards ahead, and then runs one forward and one backward; an update follows the last
    backward of each minibatch of `microbatches`. Replicas take minibatches of one in turn.
    """
    rows = []
    for stage, (count, ahead) in enumerate(zip(replicas, forwards_ahead(replicas), strict=True)):
        for replica in range(count):
            numbers = range(replica, minibatches * microbatches, count)
            forwards = [Action(stage, Kind.FORWARD, number) for number in numbers]
            rows.append(one_ahead_of_each(forwards, ahead, [_backward(stage, each, microbatches) for each in numbers]))
    placement = line(len(rows)) if len(rows) == len(replicas) else replicated(replicas)
    return Schedule(tuple(rows), placement, name)


def _backward(stage: int, number: int, microbatches: int) -> list[Action]:
    made = [Action(stage, Kind.BACKWARD, number)]
    if number % microbatches == microbatches - 1:
        made.append(Action(stage, Kind.UPDATE, number // microbatches))
    return made
