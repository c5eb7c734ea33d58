"""Weights that change while a step runs: in a forward, as nn.Embedding does with max_norm, or in a backward, where an
optimizer steps in a hook.

    in a forward     exact, unless the weight is read later than in its microbatch's turn: by remat, or by another stage
    in a backward    exact, unless another microbatch is under way, which was computed with the weight as it was
"""

from collections.abc import Sequence

from torch.nn import Parameter

from gapless.guards.weights_and_gradients import BACKWARD_WEIGHTS, FORWARD_WEIGHTS

Versions = list[tuple[Parameter, int]]  # and how often they have changed


class WeightChanges:
    """`of` the parameters of one stage."""

    def __init__(self, of: Sequence[Parameter]) -> None:
        self.of = of
        self.summed_later = False  # gradients are those of this replica alone until the step ends
        self._read_again: Versions = []
        self.hooked: Sequence[Parameter] = ()  # all, where hooks may change some of them

    def begin(self, read_again: Sequence[Parameter]) -> None:
        """A step starts. Some of them are used later than in their microbatch's turn."""
        self._read_again = versions_of(read_again)
        self.hooked = ()
        for each in self.of:
            if each._post_accumulate_grad_hooks or each._backward_hooks:
                self.hooked = self.of
                break

    def changed_in_backward(self, before: Versions, stage: int, *, others: bool) -> None:
        """A backward is over, or half of one. `others`: more microbatches are under way."""
        if not _moved(before):
            return
        why = "while other microbatches are computed with it" if others else ""
        if self.summed_later:
            why = "with the gradient of this replica alone"
        if why:
            raise BACKWARD_WEIGHTS.refusal(
                f"a hook has changed a weight of stage {stage} in a backward, as an optimizer does that steps in "
                f"register_post_accumulate_grad_hook, {why}",
                None if self.summed_later else f"{BACKWARD_WEIGHTS.way_out}, or use microbatches=1",
            )
        self._read_again = versions_of([weight for weight, _ in self._read_again])

    def finish(self, stage: int, *, whole: bool) -> None:
        """The step is over. `whole`: no other one is under way; the next begins anew, or is replayed, unseen."""
        before, self._read_again = self._read_again, [] if whole else self._read_again
        if _moved(before):
            raise FORWARD_WEIGHTS.refusal(
                f"a weight of stage {stage} was changed in the middle of a step, as a forward of nn.Embedding does "
                "with max_norm, and remat or another stage computes with it again"
            )


def versions_of(weights: Sequence[Parameter]) -> Versions:
    """As they are now."""
    return [(weight, weight._version) for weight in weights]


def _moved(before: Versions) -> bool:
    return any(weight._version != version for weight, version in before)
