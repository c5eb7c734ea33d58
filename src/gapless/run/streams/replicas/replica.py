"""A copy of the model: replicas compute on weights of their own, since those of the model move at any time.

It is a stage that holds all layers, so each of them draws as if `torch.manual_seed(seed_of(seed, minibatch, 0, layer))`
came just before it, whatever other threads draw. A module that is no sequence is one layer, number 0.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, GaplessError
from gapless.guards.weights_and_gradients import NOT_FINITE
from gapless.guards.whole_model import MODEL_EDITS
from gapless.model.layers import is_sequence
from gapless.run.clip import clip_grad_norm
from gapless.run.streams.replicas.replica_state import copy_state
from gapless.stage.batch import microbatch as mb
from gapless.stage.compiled import Compiler, compiled
from gapless.stage.stage import Stage

Loss = Callable[[Any, Any], Tensor]


class Replica:
    """One copy of the model. Between `gradient` and the next one `grads` holds a gradient for each parameter."""

    def __init__(
        self, number: int, model: nn.Module, compiler: Compiler | None, loss: Loss, seed: int, clip: float | None
    ) -> None:
        self.number = number
        self.module = _copied(model)
        self.parameters = list(self.module.parameters())
        self._names = [name for name, _ in self.module.named_parameters()]
        self._clip = clip
        layers = list(self.module) if is_sequence(self.module) else [self.module]  # type: ignore[call-overload]
        self._stage = Stage(compiled(layers, compiler), first_layer=0, seed=seed, loss=loss, spread=True)
        self._stage.draws_among_others()

    def follow(self, model: nn.Module) -> None:
        """Before a run: weights, modes and frozen parameters are the model's, which may have been edited."""
        ours = [(name, each.shape, each.dtype) for name, each in self.module.named_parameters()]
        theirs = [(name, each.shape, each.dtype) for name, each in model.named_parameters()]
        if ours != theirs or len(list(self.module.modules())) != len(list(model.modules())):
            raise MODEL_EDITS.refusal(
                f"this {type(model).__name__} has other layers or parameters than when its replicas were made",
                "make new ones",
            )
        for mine, its in zip(self.module.modules(), model.modules(), strict=True):
            mine.training = its.training
        for parameter, its_own in zip(self.parameters, model.parameters(), strict=True):
            parameter.requires_grad_(its_own.requires_grad)
        copy_state(model, self.module)

    def gradient(self, minibatch: int, inputs: Any, target: Any) -> Tensor:
        """Forward and backward; returns the loss."""
        for parameter in self.parameters:
            parameter.grad = None
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        inputs, target = _on(device, inputs), _on(device, target)
        try:
            _, loss = self._stage.forward(0, inputs, step=minibatch, target=target, want_outputs=False)
            self._stage.backward(0, None)
            self._stage.finish()
        except BaseException:
            self._stage.drop()
            raise
        self._check_finite(loss)
        if self._clip is not None:
            clip_grad_norm(self.parameters, self._clip)
        return loss  # type: ignore[no-any-return]

    @property
    def grads(self) -> Sequence[Tensor | None]:
        """In the order of the model's parameters."""
        return [parameter.grad for parameter in self.parameters]

    def _check_finite(self, loss: Tensor) -> None:
        for name, grad in zip(self._names, self.grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise GaplessError(f"the gradient of {name} is sparse, which replicas can't take: use sparse=False")
            if grad is not None and not grad.isfinite().all():
                raise NOT_FINITE.refusal(
                    f"the gradient of {name} is not finite, with a loss of {float(loss)}, and was not applied"
                )


@contextlib.contextmanager
def casts_unkept() -> Iterator[None]:
    """Autocast keeps the cast of a weight until it is left, for all threads; weights here change before that."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _on(device: torch.device, tree: Any) -> Any:
    if device.type == "cpu" or tree is None:
        return tree
    tensors, shape = mb.flatten(tree)
    return mb.unflatten([tensor.to(device) for tensor in tensors], shape)


def _copied(model: nn.Module) -> nn.Module:
    try:
        made = copy.deepcopy(model)
    except Exception as error:
        raise ConfigError(
            f"every replica has a copy of the model, but this {type(model).__name__} can't be copied "
            f"({type(error).__name__}: {error}): make copy.deepcopy(model) work"
        ) from error
    made.zero_grad()
    return made
