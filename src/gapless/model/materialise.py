"""From the meta device to real ones, a stage at a time: a model that is too big for one device is never whole on one.

A model built under `torch.device("meta")` has shapes and no data. Each stage's parameters and buffers get memory on the
stage's device, and then their values, from one of

    a function        init(module, name), called for each module that has parameters or buffers of its own
    "reset_parameters"   each such module's own method, which is what its constructor calls, with the numbers that
                      follow `torch.manual_seed`, however many devices there are
    a checkpoint      a mapping from names to tensors, a .safetensors file, the .index.json of several, or a folder
                      with either; only what the stage needs is read

Parameters stay the same objects, so tied ones stay tied and an optimizer may be made before or after. Memory is filled
with a mark first: what still has it afterwards was forgotten, and that is an error and not a silent wrong start.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from gapless.errors import CheckpointError, ConfigError, first_of
from gapless.guards.whole_model import EMPTY_WEIGHTS
from gapless.slow_work import slow_work
from gapless.stage.compiled import is_traced
from gapless.units import show_bytes

from .shards import Shards

Home = tuple[nn.Module, str]  # the module that has a parameter or a buffer, and its name there
_SHOWN = 5  # names in one sentence
Init = Callable[[nn.Module, str], None] | Mapping[str, Tensor] | str | os.PathLike[str]


def on_meta(layers: Sequence[Any]) -> list[str]:
    """The names, within their layers, of parameters and buffers without data."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    return [name for module in modules for name, tensor in named_tensors(module) if tensor.is_meta]


def materialise(model: nn.Module, homes: Iterable[Home], device: torch.device, init: Init) -> None:
    """Gives what is on the meta device memory on this one, and its values. `homes`: where parts of the model have their
    parameters and buffers. What has data already stays as it is.
    """
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Module, str] = {}
    empty: dict[int, Tensor] = {}
    for module, name in homes:
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None and tensor.is_meta:
            owners[module] = names.get(module, type(module).__name__)
            empty[id(tensor)] = tensor
    if not empty:
        return
    if not callable(init) and init != "reset_parameters":
        _load(model, empty, device, init)
        return
    if callable(init):
        for tensor in empty.values():
            _move(tensor, device)
        for module, name in owners.items():
            init(module, name)
    else:
        _reset(model, owners, empty, device)
    known = _names(model)
    if forgotten := [known[key][0] for key, tensor in empty.items() if _is_marked(tensor)]:
        raise EMPTY_WEIGHTS.refusal(f"init= left {first_of(forgotten, _SHOWN)} without values")


def homes_in(layers: Iterable[Any]) -> Iterator[Home]:
    """Where layers have their parameters and buffers."""
    for layer in layers:
        if is_traced(layer):
            yield from (*layer.homes(), *layer.owned_buffers())
        elif isinstance(layer, nn.Module):
            for module in layer.modules():
                yield from ((module, name) for name in (*module._parameters, *module._buffers))


def _move(tensor: Tensor, device: torch.device) -> None:
    """The same object with memory elsewhere, which is marked as not yet filled."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if not made.is_meta:
        made.fill_(_mark(made.dtype))
    _put(tensor, made)


def _put(tensor: Tensor, made: Tensor) -> None:
    """The same object with other memory."""
    swap_tensors(tensor, like(tensor, made))


def like(tensor: Tensor, made: Tensor) -> Tensor:
    """What was made in its place: a parameter as it is one, with its attributes."""
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def release(layers: Sequence[Any], kept: Sequence[Any]) -> None:
    """Back to the meta device, under the same objects: of these layers nothing is needed here but what those that are
    kept share with them. What others hold on to stays as it is.
    """
    needed = {id(tensor) for layer in kept if isinstance(layer, nn.Module) for _, tensor in named_tensors(layer)}
    for layer in layers:
        for _, tensor in named_tensors(layer) if isinstance(layer, nn.Module) else ():
            if id(tensor) not in needed and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter):
                with contextlib.suppress(RuntimeError):
                    _move(tensor, torch.device("meta"))


def _reset(
    model: nn.Module, owners: Mapping[nn.Module, str], empty: Mapping[int, Tensor], device: torch.device
) -> None:
    """With the numbers that constructors draw after `torch.manual_seed`, where they draw in `reset_parameters` alone,
    parts before wholes. What belongs to others is drawn, too, and let go of.
    """
    if without := [f"{name} ({type(module).__name__})" for module, name in owners.items() if not _resets(module)]:
        raise EMPTY_WEIGHTS.refusal(f"no reset_parameters in {', '.join(without)}")
    left, waiting = set(owners), dict(empty)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(torch.initial_seed())  # and no GPU's
        for module in _parts_first(model):
            if left and _resets(module):
                getattr(made := alone(module), _resets(module))()
                left.discard(module)
                for held, values in ((module._parameters, made._parameters), (module._buffers, made._buffers)):
                    for name, tensor in held.items() if module in owners else ():
                        if tensor is not None and waiting.pop(id(tensor), None) is not None:
                            _put(tensor, values[name].detach().to(device))  # type: ignore[union-attr]


def _resets(module: nn.Module) -> str:
    """The name of its method, if it has anything to reset."""
    names = (name for name in ("reset_parameters", "_reset_parameters") if hasattr(module, name))
    return next(names, "") if module._parameters or module._buffers else ""


def _parts_first(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.children():
        yield from _parts_first(part)
    yield module


def alone(module: nn.Module) -> nn.Module:
    """A copy that shares its parts, with marked memory on the CPU for what it has itself and is on the meta device."""
    memo: dict[int, Any] = {id(part): part for part in module.modules() if part is not module}
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_meta:
            made = torch.empty_like(tensor, device="cpu", requires_grad=False).fill_(_mark(tensor.dtype))
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(module, memo)


def _load(model: nn.Module, empty: Mapping[int, Tensor], device: torch.device, init: Any) -> None:
    """Takes each from a checkpoint, under any of its names."""
    source, known = _opened(init), _names(model)
    is_fresh = getattr(source, "is_fresh", False)
    missing, wrong = [], []
    done, total = 0, sum(tensor.nbytes for tensor in empty.values())
    with slow_work("reading weights", show_bytes(total)) as tell:
        for key, tensor in empty.items():
            value = next((found for name in known[key] if (found := source.get(name)) is not None), None)
            if value is None:
                missing.append(known[key][0])
            elif value.shape != tensor.shape:
                wrong.append(f"{known[key][0]} ({tuple(value.shape)} there, {tuple(tensor.shape)} here)")
            else:
                keeps = is_fresh
                if value.stride() != tensor.stride():
                    value, keeps = torch.empty_like(tensor, device=value.device).copy_(value.detach()), True
                _put(tensor, value.detach().to(device, tensor.dtype, copy=not keeps))
            done += tensor.nbytes
            tell(show_bytes(done))
    if wrong:
        raise CheckpointError(f"the checkpoint has other shapes for {first_of(wrong, _SHOWN)}")
    if missing:
        raise EMPTY_WEIGHTS.refusal(f"init= left {first_of(missing, _SHOWN)} without values")


def _opened(source: Any) -> Mapping[str, Tensor]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"init is a {type(source).__name__}: it is a function of a module and its name, 'reset_parameters', a "
            "mapping from names to tensors, or a .safetensors file"
        )
    if not Path(source).exists():
        raise CheckpointError(f"init={os.fspath(source)!r}: there is no such file")
    return Shards(Path(source))


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Of parameters and buffers, by their ids."""
    known: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        known.setdefault(id(tensor), []).append(name)
    return known


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _is_marked(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype is torch.bool:  # of a boolean nobody can tell
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().all())
    return bool((tensor == _mark(tensor.dtype)).all())


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
