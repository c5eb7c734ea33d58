"""Asynchronous training written from its formulas, one thing after another; shares no code with the runtime.

Minibatch m at stage r of K uses version v of that stage's weights; its gradient makes version m + 1 from version m.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless

Grads = list[Tensor | None]


class Trained(NamedTuple):
    """The loss of each minibatch, and all versions of the weights: [stage][version][parameter]."""

    losses: list[Tensor]
    history: list[list[list[Tensor]]]

    def at(self, version: int) -> list[Tensor]:
        """The weights of all stages after so many updates."""
        return [each for stage in self.history for each in stage[version]]


def version(kind: str, minibatch: int, stage: int, stages: int, anew: int = 0) -> int:
    """`anew`: where the flow was begun anew, without the versions from before."""
    return max(anew if minibatch >= anew else 0, minibatch - _behind(kind, stage, stages))


def _behind(kind: str, stage: int, stages: int) -> int:
    return {"stashing": stages - 1 - stage, "vertical": stages - 1, "2bw": 1}[kind]


def _factor(behind: int, update: int, annealed_over: int | None) -> float:
    return 1.0 if annealed_over is None else 1.0 / max(behind, 1) ** (1.0 - min(update / annealed_over, 1.0))


def _ahead(parameter: nn.Parameter, stepper: Any, behind: int, factor: float) -> Tensor:
    """p - s lr d."""
    group, state = stepper.param_groups[0], stepper.state[parameter]
    if "momentum_buffer" in state:
        direction = state["momentum_buffer"]
    else:
        count, (first, second) = state["step"].item(), group["betas"]
        mean = state["exp_avg"] / (1 - first**count)
        direction = mean / (state["exp_avg_sq"].sqrt() / (1 - second**count) ** 0.5 + group["eps"])
    return (
        (parameter - (behind * (group["lr"] * factor)) * direction).detach() if behind else parameter.detach().clone()
    )


def _all_ahead(
    group: list[nn.Parameter],
    values: list[Tensor],
    stepper: Any,
    kind: str,
    stage: int,
    stages: int,
    annealed_over: int | None,
    anew: int,
) -> list[list[Tensor]]:
    """p - s lr d for s = 0 up to the delay: minibatch anew + s has s updates between its forward and its own."""
    _set(group, values)
    behind = _behind(kind, stage, stages)
    factor = _factor(behind, anew, annealed_over)
    return [[_ahead(each, stepper, updates, factor) for each in group] for updates in range(behind + 1)]


def _own(model: nn.Module, partition: Sequence[Any]) -> list[list[nn.Parameter]]:
    if not isinstance(model, nn.Sequential):
        return [[model.get_parameter(name) for name in names] for names in partition]
    bounds = [sum(partition[:stage]) for stage in range(len(partition) + 1)]
    return [[each for layer in list(model)[a:b] for each in layer.parameters()] for a, b in itertools.pairwise(bounds)]


def _outputs(model: nn.Module, hidden: Tensor, seed_of: Callable[[int], int]) -> Tensor:
    """Layers count for seeds, and in a model that is no sequence its dropouts."""
    if isinstance(model, nn.Sequential):
        for index, layer in enumerate(model):
            torch.manual_seed(seed_of(index))
            hidden = layer(hidden)
        return hidden
    count = itertools.count()
    dropouts = [each for each in model.modules() if isinstance(each, nn.Dropout)]
    hooks = [each.register_forward_pre_hook(lambda *_: _seed(seed_of(next(count)))) for each in dropouts]
    outputs: Tensor = model(hidden)
    for hook in hooks:
        hook.remove()
    return outputs


def _seed(seed: int) -> None:
    torch.manual_seed(seed)


def _learnt(
    model: nn.Module, x: Tensor, y: Tensor, microbatches: int, seeds: tuple[int, int], around: Any = nullcontext
) -> Tensor:
    """The loss of a minibatch; the gradients of its microbatches are added up."""
    parts = []
    for number, (hidden, target) in enumerate(
        zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
    ):
        share = len(hidden) / len(x)
        with around():
            value = F.mse_loss(_outputs(model, hidden, partial(gapless.seed_of, *seeds, number)), target)
        (value * share).backward()
        parts.append(value.detach() * share)
    return reduce(torch.add, parts)


def _mean(came: Sequence[Grads]) -> Grads:
    """Of the gradients of each parameter."""
    there = ([grad for grad in grads if grad is not None] for grads in zip(*came, strict=True))
    return [reduce(torch.add, grads) / len(came) if grads else None for grads in there]


def _set(group: Sequence[nn.Parameter], values: Sequence[Tensor], grads: Grads | None = None) -> None:
    for each, value, grad in zip(group, values, grads or [None] * len(group), strict=True):
        each.data, each.grad = value.clone(), grad


def trained(
    model: nn.Module,
    partition: Sequence[int] | Sequence[Sequence[str]],
    kind: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    microbatches: int = 1,
    seed: int = 0,
    clip: float | None = None,
    ahead: bool = False,
    annealed_over: int | None = None,
    anew: int = 0,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
    replicas: int = 1,
) -> Trained:
    """The partition has the number of layers, or the names of the parameters, of each stage. With R replicas of all
    stages, minibatch k R + d is the one of replica d, and update k applies the mean of those that came.
    """
    model = copy.deepcopy(model)
    own = _own(model, partition)
    steppers = [optimizer([each for each in group if each.requires_grad]) if group else None for group in own]
    schedulers = [scheduler(each) if scheduler is not None and each is not None else None for each in steppers]
    history = [[[each.detach().clone() for each in group]] for group in own]
    used = [[stage[0]] for stage in history]  # the same, or what is predicted for it
    losses = []
    fresh: list[list[list[Tensor]]] = []  # [stage][update after `anew`][parameter]
    for update in range(-(-len(batches) // replicas)):
        if ahead and anew and update == anew:
            fresh = [
                _all_ahead(group, history[stage][anew], steppers[stage], kind, stage, len(own), annealed_over, anew)
                for stage, group in enumerate(own)
            ]
        came: list[list[Grads]] = []  # [minibatch][stage][parameter]
        for minibatch in range(len(batches))[update * replicas :][:replicas]:
            for stage, group in enumerate(own):  # the weights that this minibatch uses
                values = used[stage][version(kind, update, stage, len(own), anew)]
                if fresh and update - anew < len(fresh[stage]):
                    values = fresh[stage][update - anew]
                _set(group, values)
            losses.append(
                _learnt(model, *batches[minibatch], microbatches, (seed, minibatch), partial(around, minibatch))
            )
            came.append([[each.grad for each in group] for group in own])
        for stage, group in enumerate(own):  # applied to the newest there are
            _set(group, history[stage][update], _mean([each[stage] for each in came]))
            stepper, then = steppers[stage], schedulers[stage]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(group, clip)
            behind = _behind(kind, stage, len(own))
            factor, following = (_factor(behind, number, annealed_over) for number in (update, update + 1))
            if stepper is not None:
                rate = stepper.param_groups[0]["lr"]
                stepper.param_groups[0]["lr"] = rate * factor
                stepper.step()
                stepper.param_groups[0]["lr"] = rate
            if then is not None:
                then.step()
            history[stage].append([each.detach().clone() for each in group])
            used[stage].append(
                [_ahead(each, stepper, behind, following) if ahead else each.detach().clone() for each in group]
            )
    return Trained(losses, history)


def in_turns(
    model: nn.Module,
    partition: Sequence[int] | Sequence[Sequence[str]],
    replicas: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    seed: int = 0,
    clip: float | None = None,
    ahead: bool = False,
    ends: Sequence[int] = (),
) -> tuple[Trained, list[list[int]]]:
    """With R_s replicas of stage s: its updates take groups of R_s minibatches, and k = floor(m / R_s) uses version
    max(0, k - w_s), w_s = floor((R - 1 - R_0 - ... - R_{s-1}) / R_s). A stream that ends before minibatch m applies
    what has come of a group, and its groups begin anew with m. And how many versions there are besides the first, of
    each stage, before every minibatch and at the end.
    """
    model = copy.deepcopy(model)
    own = _own(model, partition)
    steppers = [optimizer(group) for group in own]
    schedulers = [None if scheduler is None else scheduler(each) for each in steppers]
    late = [(sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage] for stage in range(len(own))]
    history = [[[each.detach().clone() for each in group]] for group in own]
    used = [[stage[0]] for stage in history]
    came: list[list[Grads]] = [[] for _ in own]
    origin, before = 0, [0] * len(own)
    losses, counts = [], []

    def update(stage: int) -> None:
        group = own[stage]
        _set(group, history[stage][-1], _mean(came[stage]))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(group, clip)
        steppers[stage].step()
        if schedulers[stage] is not None:
            schedulers[stage].step()  # type: ignore[union-attr]
        history[stage].append([each.detach().clone() for each in group])
        used[stage].append(
            [_ahead(each, steppers[stage], late[stage], 1.0) if ahead else each.detach().clone() for each in group]
        )
        came[stage].clear()

    for minibatch in range(len(batches) + 1):
        counts.append([len(stage) - 1 for stage in history])
        if minibatch in ends or minibatch == len(batches):
            for stage in range(len(own)):
                if came[stage]:
                    update(stage)
            origin, before = minibatch, [len(stage) - 1 for stage in history]
        if minibatch == len(batches):
            break
        for stage, group in enumerate(own):
            k = before[stage] + (minibatch - origin) // replicas[stage]
            _set(group, used[stage][max(0, k - late[stage])])
        losses.append(_learnt(model, *batches[minibatch], 1, (seed, minibatch)))
        for stage, group in enumerate(own):
            came[stage].append([each.grad for each in group])
            if len(came[stage]) == replicas[stage]:
                update(stage)
    return Trained(losses, history), [*counts, [len(stage) - 1 for stage in history]]
