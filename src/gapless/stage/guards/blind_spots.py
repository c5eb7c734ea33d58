"""Where guards can't look, in the stages of one process: `print(pipe)` says so, a line for each reason."""

from collections.abc import Iterator, Sequence

from gapless.guards.batches_and_losses import LOSS_DIVISORS
from gapless.guards.guard import Guard
from gapless.guards.held_state import STORED_TENSORS
from gapless.guards.process_wide import BACKWARD_DRAWS, SHARED_GENERATORS, UNSEEN_DRAWS
from gapless.guards.weights_and_gradients import FORWARD_BACKWARDS, FORWARD_GRADS, FROZEN_WEIGHTS, LOOSE_TENSORS
from gapless.stage.split.interception import is_open
from gapless.stage.stage import Stage

_BY_INTERCEPTION = (FORWARD_GRADS, FROZEN_WEIGHTS, FORWARD_BACKWARDS)


def unwatched(stages: Sequence[Stage], *, processes: bool, replicas: bool) -> Iterator[str]:
    """`processes`: other stages are in others. `replicas`: there are some, with batches of their own."""
    calls = [stage.calls for stage in stages]
    reasons: dict[str, tuple[Guard, ...]] = {}
    if count := sum(each.num_compiled for each in calls):
        what = (STORED_TENSORS, *_BY_INTERCEPTION, SHARED_GENERATORS, BACKWARD_DRAWS)
        reasons[f"{count} compiled layer{'s' if count > 1 else ''} can't be looked into"] = what
    quick = [each for each in stages if each.calls.mode.one_thread and not each.split]
    if count := sum(is_open((*s.layers, s.loss)[number]) for s in quick for number in s.calls.unwatched.trusted):
        reasons[f"{count} of your layers drew nothing, so they run without interception"] = _BY_INTERCEPTION
    if any(each.unwatched.has_given_up for each in calls):
        reasons["another thread of this process draws from torch's generators during steps"] = (UNSEEN_DRAWS,)
    if processes and any(each.is_open for each in calls):
        reasons["other stages are in other processes"] = (LOOSE_TENSORS,)
    if replicas and any(each.divisors is not None for each in calls):
        reasons["replicas are not compared"] = (LOSS_DIVISORS,)
    for reason, guards in reasons.items():
        yield f"not watched: {', '.join(guard.name for guard in guards)} ({reason})"
