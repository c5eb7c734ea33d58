"""FSDP2 on the layers of a stage: who unshards, reshards and reduces, and when.

    first F                 parameters are gathered, by FSDP's own hook, and stay
    all further actions     nothing is communicated
    after the last W        gradients are reduced, or kept whole for a later step; parameters are sharded again

A weight gradient that waits for its W belongs to the gathered parameter, so that must still be there. The weights of
microbatches are shares of the whole minibatch: gradients are added up and not averaged.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from gapless.model.layers import fsdp_groups
from gapless.stage.stage import Stage


class Sharded:
    """The modules that `fully_shard` was applied to, by stage."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._modules = {number: list(_sharded(stage)) for number, stage in stages.items()}

    def begin(self) -> None:
        """A step starts: until its end nothing is reduced and nothing is given up."""
        for module in chain(*self._modules.values()):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reshard_after_forward(False, recurse=False)
            _set(module, at_the_end=False)

    def finish(self, stage: int, *, sync: bool) -> None:
        """The stage's last weight gradient is there. Without `sync` a later step adds to it, and reduces the sum."""
        for module in self._modules[stage]:
            _set(module, at_the_end=True)
            module.set_requires_gradient_sync(sync, recurse=False)
        for module in self._modules[stage]:
            root = module._get_fsdp_state()
            if root._is_root:
                for state in root._state_ctx.all_states:
                    for group in fsdp_groups(state):
                        group.post_backward()
                root._root_post_backward_final_callback()

    def drop(self) -> None:
        """Gradients that were kept whole are not wanted any more."""
        for module in chain(*self._modules.values()):
            for group in fsdp_groups(module._get_fsdp_state()):
                for parameter in group.fsdp_params:
                    if "unsharded_accumulated_grad" in vars(parameter):  # newer ones have all in the `.grad` below
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None

    def release(self) -> None:
        """Whatever is gathered is sharded again."""
        for module in chain(*self._modules.values()):
            module.reshard()


def _set(module: Any, *, at_the_end: bool) -> None:
    module.set_is_last_backward(at_the_end)
    module.set_reshard_after_backward(at_the_end, recurse=False)
    module.set_requires_gradient_sync(at_the_end, recurse=False)


def _sharded(stage: Stage) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has applied it has imported it
    for part in (*stage.layers, stage.loss) if fsdp is not None else ():
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if fsdp is not None and isinstance(module, fsdp.FSDPModule):
                yield module
