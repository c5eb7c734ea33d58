"""What a user asks of replicas, checked: a fact, its numbers and the way out where it can't be done."""

from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from gapless.errors import ConfigError
from gapless.guards.whole_model import LEFT_OUT_PARAMETERS
from gapless.model.layers import check_parts
from gapless.model.materialise import on_meta


def check_whole(word: str, value: Any, least: int) -> int:
    """The value, which must be a whole number that is large enough."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{word} is {value!r}, but it must be a whole number of at least {least}")
    return value


def check_replicas(replicas: Any, mesh: Any) -> range:
    """The numbers of those in this process."""
    if mesh is None:
        if replicas is None:
            raise ConfigError("give replicas=, a number of threads of this process, or mesh=, with a rank for each")
        return range(check_whole("replicas", replicas, 1))
    number, ranks = _check_mesh(mesh)
    if replicas not in (None, ranks):
        raise ConfigError(
            f"replicas is {replicas!r}, but the mesh has {ranks} ranks, with one each: leave replicas out"
        )
    return range(number, number + 1)


def _check_mesh(mesh: Any) -> tuple[int, int]:
    """The number of this rank's replica, and how many there are."""
    import torch.distributed as dist  # here alone: it need not be there
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is {mesh!r:.40}, but it must be a torch DeviceMesh with the dimension 'dp'")
    if mesh.mesh_dim_names != ("dp",):
        names = ", ".join(map(repr, mesh.mesh_dim_names or ())) or "without names"
        raise ConfigError(
            f"the mesh has the dimensions {names}, but every rank has a whole model here: make one with "
            "init_device_mesh('cpu', (ranks,), mesh_dim_names=('dp',)), or pass mesh['dp']"
        )
    if mesh.get_coordinate() is None:
        raise ConfigError(f"rank {dist.get_rank()} is not in the mesh: only its ranks make the replicas")
    return mesh.get_local_rank(), mesh.size()


def check_ways(bound: Any, local_steps: Any, average_state: bool) -> None:
    """They go together."""
    if bound is not None:
        check_whole("bound", bound, 0)
    if local_steps is not None:
        check_whole("local_steps", local_steps, 1)
    if bound is not None and local_steps is not None:
        raise ConfigError(
            f"bound={bound} is for replicas that share weights, but with local_steps={local_steps} each has its own "
            "and waits for the others at every average: leave out one of them"
        )
    if average_state and local_steps is None:
        raise ConfigError(
            "average_state=True is for local_steps=, but without it there is one optimizer, whose state exists once: "
            "leave it out"
        )


def check_model(model: Any, loss: Any, scaler: object) -> None:
    """It can be copied, and its copies compute what it would."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, but every replica has a copy of a module: pass an nn.Module, such "
            "as nn.Sequential(*layers)"
        )
    check_parts(model)
    if empty := on_meta([model]):
        raise ConfigError(f"{empty[0]} is on the meta device, without data: give it values first")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a hook, which copies of it do not have: remove it, and use clip= where it is for that"
            )
    if loss is not None and not callable(loss):
        raise ConfigError(f"loss is {loss!r:.40}, but it must be a function of the outputs and the target")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ConfigError(
            f"the loss is a {type(loss).__name__} with parameters of its own, which no replica would have a copy of: "
            "make it a part of the model"
        )
    if scaler is not None:
        raise ConfigError(
            f"a {type(scaler).__name__} chooses one scale for all gradients and skips updates, which replicas that do "
            "not wait can't agree on: use bfloat16, which needs no scaler"
        )


def made_optimizer(make: Any, parameters: list[nn.Parameter]) -> Optimizer:
    """One over these parameters."""
    if isinstance(make, Optimizer) or not callable(make):
        raise ConfigError(
            f"optimizer is a {type(make).__name__}, but it must be a function that makes one from parameters, such as "
            "lambda params: torch.optim.SGD(params, lr=0.1)"
        )
    made = make(parameters)
    if not isinstance(made, Optimizer) or isinstance(made, LBFGS):
        raise ConfigError(
            f"optimizer made a {type(made).__name__}, but it must be a torch.optim.Optimizer that steps without a "
            "closure, such as SGD or AdamW"
        )
    known = set(parameters)
    strangers = [each for group in made.param_groups for each in group["params"] if each not in known]
    if strangers:
        raise LEFT_OUT_PARAMETERS.refusal(
            f"the optimizer has {len(strangers)} parameters that it was not given, so the replicas' updates would miss "
            "them",
            "make it from the parameters that the function gets, lambda params: torch.optim.SGD(params, lr=0.1)",
        )
    return made


def made_scheduler(make: Any, optimizer: Optimizer) -> Any:
    """One of that optimizer, if asked for."""
    if make is None:
        return None
    if not callable(make):
        raise ConfigError(f"scheduler is a {type(make).__name__}, but it must be a function of an optimizer")
    made = make(optimizer)
    if isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "a ReduceLROnPlateau needs a loss that all replicas agree on at every step: use a schedule of steps, such "
            "as CosineAnnealingLR, or change the learning rate between two runs"
        )
    return made
