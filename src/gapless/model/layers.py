"""A model as a sequence of layers, with the names its parameters had before anybody cut it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import is_lazy

from gapless.errors import ConfigError, PartitionError, did_you_mean
from gapless.guards.whole_model import IGNORED_HOOKS, LEFT_OUT_PARAMETERS, MODEL_EDITS
from gapless.stage.batch import microbatch as mb

Layer = Callable[..., Any]


def _no_model(model: Any) -> str:
    if isinstance(model, type):
        return f"the model is the class {model.__name__}, but it must be one of its objects: pass {model.__name__}(...)"
    return f"the model is a {type(model).__name__}, but it must be an nn.Module or a list of layers"


class Layers:
    """The layers in order, and the module that owns their parameters under their original names."""

    def __init__(self, model: Any, by_hand: Sequence[Layer] | None = None) -> None:
        """`by_hand`: layers that together are the model, which then only names their parameters."""
        self._given = model, by_hand
        if by_hand is not None:
            self.layers: list[Layer] = list(by_hand)
            self.module: nn.Module = model
            _check_owned(self.layers, model)
        elif isinstance(model, nn.Module) and is_sequence(model):
            self.module = model
            self.layers = list(model)  # type: ignore[call-overload]
        elif isinstance(model, Sequence | Iterable) and not isinstance(model, nn.Module):
            self.layers = list(model)
            self.module = _owner(self.layers)
        else:
            raise PartitionError(_no_model(model))
        check_parts(self.module)
        for number, layer in enumerate(self.layers):
            if not callable(layer) or (isinstance(layer, nn.Module) and _has_no_forward(layer)):
                raise PartitionError(f"layer {number} is a {type(layer).__name__}, which can't be called")

    def called(self) -> Sequence[Any]:
        """What the layers are taken from, as it is now: the module, or the layers in its user's list."""
        model, by_hand = self._given
        given = model if by_hand is None else by_hand
        if isinstance(given, nn.Module):
            return [given]
        return given if isinstance(given, Sequence) else self.layers

    def unused(self) -> Sequence[Any]:
        """Where parameters and buffers are that no layer has: nowhere."""
        return ()

    def prepare(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Microbatches as they are."""
        if parts and self.layers:
            check_call(
                self.layers[0], *mb.call_of(parts[0]), who=f"the first layer, a {type(self.layers[0]).__name__},"
            )
        return parts

    def again(self) -> "Layers":
        """The same model as it is now, after its user has edited it."""
        model, by_hand = self._given
        more = more_than_its_layers(model) if by_hand is None else None
        if more is not None:
            raise MODEL_EDITS.refusal(
                f"this {type(model).__name__} was a sequence when the pipeline was made, but has {more} now, which "
                "the pipeline would ignore",
                "make a new pipeline",
            )
        if by_hand is not None or isinstance(model, nn.Module | Sequence):
            return Layers(model, by_hand)
        return self


def check_call(called: Layer, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, who: str) -> None:
    """A layer or a model takes as many inputs as a microbatch has, under these names."""
    if isinstance(called, nn.Module) and (called._forward_pre_hooks or type(called).__call__ is not nn.Module.__call__):
        return  # which may take others
    with suppress(ValueError):  # of what is not written in Python nothing is known
        known = signature(called.forward if isinstance(called, nn.Module) else called)
        try:
            known.bind(*args, **kwargs)
        except TypeError as error:
            unknown = [name for name in kwargs if name not in known.parameters]
            given = ", ".join(unknown or kwargs) or f"{len(args)} input{'s' if len(args) > 1 else ''}"
            otherwise = f"{error}; a target comes after the inputs, as in step(x, target)"
            way_out = misspelt(called, kwargs) or otherwise
            raise ConfigError(
                f"the batch has {given}, but {who} takes {', '.join(known.parameters)}: {way_out}"
            ) from None


def misspelt(called: Layer, names: Iterable[str]) -> str:
    """What somebody meant by a name that is none of the layer's or the model's arguments; nothing if nobody knows."""
    known = signature(called.forward if isinstance(called, nn.Module) else called).parameters
    meant = ((name, did_you_mean(name, known, "")) for name in names if name not in known)
    return next((f"for {name}, {question}" for name, question in meant if question), "")


def cost_of(layer: Layer) -> int:
    """Its parameters, and one for its existence: a stand-in until layers have been measured."""
    return 1 + (sum(p.numel() for p in layer.parameters()) if isinstance(layer, nn.Module) else 0)


def check_parts(model: nn.Module) -> None:
    """Every parameter and buffer has a shape: of lazy layers only their first call tells it. And every module is one of
    Python: one that was scripted hides its calls, and hands out its buffers in another way.
    """
    for name, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name or 'the model'} is a module that torch.jit has compiled, into which a pipeline can't look: use "
                "the module as it was before torch.jit.script or torch.jit.trace (torch.compile works, and so do "
                "scripted functions)"
            )
        if any(is_lazy(each) for each in (*part._parameters.values(), *part._buffers.values())):
            raise ConfigError(
                f"{name or 'the model'} is a {type(part).__name__} whose parameters have no shape yet: call the model "
                "once with a batch, under torch.no_grad(), before its pipeline and its optimizer are made"
            )


def is_sequence(model: Any) -> bool:
    """Whether it is cut between its layers, and not traced."""
    return not isinstance(model, nn.Module) or (_holds_layers(model) and more_than_its_layers(model) is None)


def more_than_its_layers(model: Any) -> str | None:
    """What a call of a Sequential or a ModuleList does beyond calling its layers in order, in words; None if nothing.

    Whoever takes such a module apart leaves that out, without a word.
    """
    if not isinstance(model, nn.Module) or not _holds_layers(model):
        return None
    kind = type(model)
    plain = nn.Sequential if isinstance(model, nn.Sequential) else nn.ModuleList
    if kind.forward is not plain.forward or "forward" in model.__dict__:
        return "a forward of its own"
    if kind.__call__ is not nn.Module.__call__:
        return "a __call__ of its own"
    if plain is nn.ModuleList:
        return None  # nobody can call it, so its hooks never run
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    if not all(_is_of_fsdp(model, hook) for each in hooks for hook in each.values()):
        return "hooks of its own"
    return None


def _is_of_fsdp(model: nn.Module, hook: Any) -> bool:
    """Where `fully_shard` was applied to all layers, its hooks on the model have nothing to do."""
    state = fsdp_state(model)
    return state is not None and isinstance(getattr(hook, "__self__", None), type(state))


def fsdp_state(module: nn.Module) -> Any:
    """What `fully_shard` keeps of a module, or None."""
    find = getattr(module, "_get_fsdp_state", None)
    return None if find is None else find()


def fsdp_groups(state: Any) -> list[Any]:
    """Of parameters, in what `fully_shard` keeps: newer ones have several."""
    found = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def check_sharded(model: Any, *, traced: bool) -> None:
    """A pipeline calls layers, and never the model: what `fully_shard` does when that is called is never done."""
    if not isinstance(model, nn.Module):
        return
    count = sum(len(group.fsdp_params) for group in fsdp_groups(fsdp_state(model)))
    if traced and any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} is sharded by fully_shard, which a traced model can't be: pass its layers as "
            "layers=, and shard each layer by itself"
        )
    if count:
        raise ConfigError(
            f"fully_shard of the whole model has taken {count} of its parameters, and a pipeline never calls a model "
            "as a whole: first shard every layer that has parameters"
        )


def check_no_hooks_for_all(model: Any) -> None:
    """A module is cut, and never called as a whole: a hook for all modules would not see it, and might see our parts
    of it instead. Layers in a list are called one by one, as their user would.
    """
    if _has_any_global_hook() and isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        raise IGNORED_HOOKS.refusal(
            f"hooks for all modules would never see this {type(model).__name__}, as a pipeline calls only its parts"
        )


def _holds_layers(model: nn.Module) -> bool:
    return isinstance(model, nn.Sequential | nn.ModuleList)


def _has_no_forward(layer: nn.Module) -> bool:
    plain = type(layer).forward is nn.Module.forward and type(layer).__call__ is nn.Module.__call__
    return plain and "forward" not in layer.__dict__


def _check_owned(layers: Sequence[Layer], model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise PartitionError(
            f"layers= cuts a module by hand, but the model is a {type(model).__name__}: pass one of them"
        )
    owned = set(model.parameters())
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            if parameter not in owned:
                raise LEFT_OUT_PARAMETERS.refusal(
                    f"layer {number} has the parameter {name}, which the model does not have",
                    "its gradient would never reach the optimizer",
                    PartitionError,
                )


def _owner(layers: Sequence[Layer]) -> nn.Module:
    """Names as in an nn.Sequential of the same layers: `3.weight` is of layer 3, also where others are plain
    functions.
    """
    owner = nn.Module()
    for number, layer in enumerate(layers):
        if isinstance(layer, nn.Module):
            owner.add_module(str(number), layer)
    return owner
