"""All guards, in the order in which they are read."""

from . import (
    batches_and_losses,
    between_ranks,
    held_state,
    passed_tensors,
    process_wide,
    weights_and_gradients,
    whole_model,
)
from .guard import Guard

_GROUPS = (
    held_state,
    process_wide,
    weights_and_gradients,
    passed_tensors,
    batches_and_losses,
    whole_model,
    between_ranks,
)
GUARDS = {
    (group.__doc__ or "").rstrip("."): [each for each in vars(group).values() if isinstance(each, Guard)]
    for group in _GROUPS
}
