"""Asynchronous training written from its formulas, one thing after another; shares no code with the runtime.

Minibatch m at stage r of K uses version v of that stage's weights; its gradient makes version m + 1 from version m.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

import gapless


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
    for each, value in zip(group, values, strict=True):
        each.data = value.clone()
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


def trained(
    model: nn.Module,
    partition: Sequence[int] | Sequence[Sequence[str]],
    kind: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    microbatches: int = 1,
    seed: int = 0,
    clip: float | None = None,
    ahead: bool = False,
    annealed_over: int | None = None,
    anew: int = 0,
    around: Callable[[int], AbstractContextManager[object]] = nullcontext,
) -> tuple[list[Tensor], list[list[list[Tensor]]]]:
    """The loss of each minibatch, and all versions of the weights of each stage: [stage][version][parameter]. The
    partition has the number of layers, or the names of the parameters, of each stage.
    """
    model = copy.deepcopy(model)
    own = _own(model, partition)
    steppers = [optimizer([each for each in group if each.requires_grad]) if group else None for group in own]
    schedulers = [scheduler(each) if scheduler is not None and each is not None else None for each in steppers]
    history = [[[each.detach().clone() for each in group]] for group in own]
    used = [[stage[0]] for stage in history]  # the same, or what is predicted for it
    losses = []
    fresh: list[list[list[Tensor]]] = []  # [stage][minibatch after `anew`][parameter]
    for minibatch, (x, y) in enumerate(batches):
        if ahead and anew and minibatch == anew:
            fresh = [
                _all_ahead(group, history[stage][anew], steppers[stage], kind, stage, len(own), annealed_over, anew)
                for stage, group in enumerate(own)
            ]
        for stage, group in enumerate(own):  # the weights that this minibatch uses
            values = used[stage][version(kind, minibatch, stage, len(own), anew)]
            if fresh and minibatch - anew < len(fresh[stage]):
                values = fresh[stage][minibatch - anew]
            for each, value in zip(group, values, strict=True):
                each.data, each.grad = value.clone(), None
        parts = []
        for number, (hidden, target) in enumerate(
            zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
        ):
            share = len(hidden) / len(x)
            with around(minibatch):
                value = loss(_outputs(model, hidden, partial(gapless.seed_of, seed, minibatch, number)), target)
            (value * share).backward()
            parts.append(value.detach() * share)
        losses.append(reduce(torch.add, parts))
        for stage, group in enumerate(own):  # applied to the newest there are
            grads = [each.grad for each in group]
            for each, value, grad in zip(group, history[stage][minibatch], grads, strict=True):
                each.data, each.grad = value.clone(), grad
            stepper, then = steppers[stage], schedulers[stage]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(group, clip)
            behind = _behind(kind, stage, len(own))
            factor, following = (_factor(behind, update, annealed_over) for update in (minibatch, minibatch + 1))
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
    return losses, history


def replicated(
    model: nn.Sequential,
    partition: Sequence[int],
    kind: str,
    batches: Sequence[Sequence[tuple[Tensor, Tensor]]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    microbatches: int = 1,
    seed: int = 0,
) -> tuple[list[list[Tensor]], list[list[list[Tensor]]]]:
    """With as many replicas R of every stage as there are in `batches`: minibatch k of replica d is number k R + d of
    all, and update k applies the mean of those that came. The losses of each replica, and all versions of the weights.
    """
    model, bounds = copy.deepcopy(model), [sum(partition[:stage]) for stage in range(len(partition) + 1)]
    own = [[p for layer in list(model)[a:b] for p in layer.parameters()] for a, b in itertools.pairwise(bounds)]
    steppers = [optimizer(group) for group in own]
    history = [[[each.detach().clone() for each in group]] for group in own]
    losses: list[list[Tensor]] = [[] for _ in batches]
    for k in range(max(map(len, batches))):
        came = []
        for replica, mine in enumerate(batches):
            if k >= len(mine):
                continue
            for stage, group in enumerate(own):
                for each, value in zip(group, history[stage][version(kind, k, stage, len(own))], strict=True):
                    each.data, each.grad = value.clone(), None
            x, y = mine[k]
            parts = []
            for number, (hidden, target) in enumerate(
                zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True)
            ):
                share = len(hidden) / len(x)
                for index, layer in enumerate(model):
                    torch.manual_seed(gapless.seed_of(seed, k * len(batches) + replica, number, index))
                    hidden = layer(hidden)
                value = loss(hidden, target)
                (value * share).backward()
                parts.append(value.detach() * share)
            losses[replica].append(reduce(torch.add, parts))
            came.append([[each.grad for each in group if each.grad is not None] for group in own])
        for stage, group in enumerate(own):
            for place, each in enumerate(group):
                total = came[0][stage][place].clone()
                for other in came[1:]:
                    total += other[stage][place]
                total /= len(came)
                each.data, each.grad = history[stage][k][place].clone(), total
            steppers[stage].step()
            history[stage].append([each.detach().clone() for each in group])
    return losses, history


def in_turns(
    model: nn.Module,
    partition: Sequence[int] | Sequence[Sequence[str]],
    replicas: Sequence[int],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    seed: int = 0,
    clip: float | None = None,
    ahead: bool = False,
    ends: Sequence[int] = (),
) -> tuple[list[Tensor], list[list[list[Tensor]]], list[list[int]]]:
    """With R_s replicas of stage s: its updates take groups of R_s minibatches, and k = floor(m / R_s) uses version
    max(0, k - w_s), w_s = floor((R - 1 - R_0 - ... - R_{s-1}) / R_s). A stream that ends before minibatch m applies
    what has come of a group, and its groups begin anew with m. The losses, all versions of the weights of each stage,
    and how many of these there are besides the first, of each stage, before every minibatch and at the end.
    """
    model = copy.deepcopy(model)
    own = _own(model, partition)
    steppers = [optimizer(group) for group in own]
    schedulers = [None if scheduler is None else scheduler(each) for each in steppers]
    late = [(sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage] for stage in range(len(own))]
    history = [[[each.detach().clone() for each in group]] for group in own]
    used = [[stage[0]] for stage in history]
    came: list[list[list[Tensor]]] = [[] for _ in own]
    origin, before = 0, [0] * len(own)
    losses, counts = [], []

    def update(stage: int) -> None:
        group = own[stage]
        for place, each in enumerate(group):
            total = came[stage][0][place].clone()
            for other in came[stage][1:]:
                total += other[place]
            each.data, each.grad = history[stage][-1][place].clone(), total / len(came[stage])
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
            for each, value in zip(group, used[stage][max(0, k - late[stage])], strict=True):
                each.data, each.grad = value.clone(), None
        x, y = batches[minibatch]
        value = loss(_outputs(model, x, partial(gapless.seed_of, seed, minibatch, 0)), y)
        value.backward()
        losses.append(value.detach())
        for stage, group in enumerate(own):
            came[stage].append([each.grad.clone() for each in group if each.grad is not None])
            if len(came[stage]) == replicas[stage]:
                update(stage)
    return losses, history, [*counts, [len(stage) - 1 for stage in history]]
