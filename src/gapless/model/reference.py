"""The reference for any model: the plain loop over microbatches, in which a traced module runs as one uncut graph.

Without randomness that is the loop anybody would write around the model itself. With it, the n-th random call of the
graph draws after `torch.manual_seed(seed_of(seed, step, microbatch, n))`.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from gapless.model.traced.capture import Captured, find_loss, own_loss
from gapless.model.traced.piece import as_it_is
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch import plain
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.minibatch import Minibatch
from gapless.stage.batch.plain import PlainResult
from gapless.stage.compiled import compiled, uncompiled
from gapless.stage.norm.running_statistics import BatchNorm
from gapless.stage.random.seeds import seed_of

from .layers import Layers, check_no_hooks_for_all, is_sequence


class Reference:
    """A traced module as the one layer of the plain loop. It keeps its traces, so a second step is quick."""

    def __init__(self, model: nn.Module) -> None:
        model, compiler = uncompiled(model)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._captured = Captured(model, [device])
        self._layer = self._captured.layers[0]
        self._layer.compiler = compiler

    def step(self, inputs: Any, target: Any = None, *, seed: int = 0, step: int = 0, **options: Any) -> PlainResult:
        """As `plain_step`."""
        microbatch = -1
        self._captured.notice()

        def layer(*args: Any, **kwargs: Any) -> Any:
            nonlocal microbatch
            microbatch += 1
            return self._layer(*self._captured.prepare([kwargs or args]))

        layer.module = self._layer  # type: ignore[attr-defined]  # whose batch norms count

        self._layer.bind(lambda number: torch.manual_seed(seed_of(seed, step, microbatch, number)), as_it_is)
        options = {"loss": own_loss, "loss_weight": None, **options}

        def weigh(batch: Minibatch) -> Weighed:
            return self._captured.weighed(self._captured.prepare(batch.parts), batch, options["loss_weight"])

        if options["loss"] is own_loss:
            options |= {"weigh": weigh, "own": find_loss}
        return plain.plain_step([layer], inputs, target, seed=seed, step=step, **options)


def plain_step(
    model: nn.Module | Sequence[Callable[..., Any]],
    inputs: Any,
    target: Any = None,
    *,
    microbatches: int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    seed: int = 0,
    step: int = 0,
    loss_weight: mb.LossWeight = None,
    batch_dims: Any = None,
    target_dims: Any = None,
    batchnorm: BatchNorm = "microbatch",
    weight: float | Fraction = 1.0,
    cut: bool = True,
) -> PlainResult:
    """Forward and backward of a minibatch by plain torch; gradients are added to `.grad`.

    The options are those of a `Pipeline` and of its `step`. Torch's default generators are reseeded. A module is
    traced at every call; `gapless.model.reference.Reference` keeps its traces.
    """
    options: dict[str, Any] = {
        "microbatches": microbatches,
        "loss": own_loss if loss is None else loss,
        "seed": seed,
        "step": step,
        "loss_weight": loss_weight,
        "batch_dims": batch_dims,
        "target_dims": target_dims,
        "batchnorm": batchnorm,
        "weight": weight,
        "cut": cut,
    }
    whole, compiler = uncompiled(model)
    check_no_hooks_for_all(whole)
    if is_sequence(whole):
        options["own"] = find_loss if loss is None else None
        return plain.plain_step(compiled(Layers(whole).layers, compiler), inputs, target, **options)
    assert isinstance(model, nn.Module)
    return Reference(model).step(inputs, target, **options)
