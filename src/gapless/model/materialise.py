"""From the meta device to real ones, a stage at a time: a model that is too big for one device is never whole on one.

A model built under `torch.device("meta")` has shapes and no data. Each stage's parameters and buffers get memory on the
stage's device, and then their values, from one of

    a function        init(module, name), called for each module that has parameters or buffers of its own
    "reset_parameters"   each such module's own method, which is what its constructor calls
    a checkpoint      a mapping from names to tensors, a .safetensors file, or the .index.json of several;
                      only what the stage needs is read

Parameters stay the same objects, so tied ones stay tied and an optimizer may be made before or after. Memory is filled
with a mark first: what still has it afterwards was forgotten, and that is an error and not a silent wrong start.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from gapless.errors import CheckpointError, ConfigError
from gapless.guards.whole_model import EMPTY_WEIGHTS

Init = Callable[[nn.Module, str], None] | Mapping[str, Tensor] | str | os.PathLike[str]


def on_meta(layers: Sequence[Any]) -> list[str]:
    """The names, within their layers, of parameters and buffers without data."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    return [name for module in modules for name, tensor in named_tensors(module) if tensor.is_meta]


def materialise(model: nn.Module, layers: Sequence[Any], device: torch.device, init: Init) -> None:
    """Gives the layers, which are parts of the model, memory on the device, and their values. What has data already
    stays as it is.
    """
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Module, str] = {}
    made: dict[int, Tensor] = {}
    for layer in layers:
        for inner, module in layer.named_modules() if isinstance(layer, nn.Module) else ():
            own = [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]
            empty = [tensor for tensor in own if tensor.is_meta or id(tensor) in made]
            if empty:
                owners[module] = names.get(module, inner)
            for tensor in empty:
                if tensor.is_meta:
                    _move(tensor, device)
                    made[id(tensor)] = tensor
    if callable(init):
        for module, name in owners.items():
            init(module, name)
    elif init == "reset_parameters":
        _reset(owners)
    else:
        _load(model, made, init)
    _check_filled(model, made)


def _move(tensor: Tensor, device: torch.device) -> None:
    """The same object with memory elsewhere, which is marked as not yet filled."""
    made: Tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if not made.is_meta:
        made.fill_(_mark(made.dtype))
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    swap_tensors(tensor, made)


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


def _reset(owners: Mapping[nn.Module, str]) -> None:
    without = []
    for module, name in owners.items():
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if reset is None:
            without.append(f"{name} ({type(module).__name__})")
        else:
            reset()
    if without:
        raise EMPTY_WEIGHTS.refusal(f"no reset_parameters in {', '.join(without)}")


def _load(model: nn.Module, made: Mapping[int, Tensor], source: Any) -> None:
    """Copies what was made from a checkpoint, under any of its names."""
    known: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        known.setdefault(id(tensor), []).append(name)
    wrong = []
    with _opened(source) as read, torch.no_grad():
        for tensor in made.values():
            value = next((found for name in known[id(tensor)] if (found := read(name)) is not None), None)
            if value is not None and value.shape != tensor.shape:
                shapes = f"{tuple(value.shape)} there, {tuple(tensor.shape)} here"
                wrong.append(f"{known[id(tensor)][0]} ({shapes})")
            elif value is not None:
                tensor.copy_(value)
    if wrong:
        raise CheckpointError(f"the checkpoint has other shapes for {', '.join(wrong)}")


@contextlib.contextmanager
def _opened(source: Any) -> Iterator[Callable[[str], Tensor | None]]:
    """A function that reads one tensor, or None if there is none of that name."""
    if isinstance(source, Mapping):
        yield source.get
        return
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"init is a {type(source).__name__}: it is a function of a module and its name, 'reset_parameters', a "
            "mapping from names to tensors, or a .safetensors file"
        )
    try:
        from safetensors import safe_open
    except ImportError:
        raise ConfigError(
            f"init={os.fspath(source)!r}: to read a file install safetensors, or give a mapping from names to tensors"
        ) from None
    path = Path(source)
    if not path.is_file():
        raise CheckpointError(f"init={str(path)!r}: there is no such file")
    with contextlib.ExitStack() as stack:
        opened = functools.cache(lambda name: stack.enter_context(safe_open(path.parent / name, framework="pt")))
        if path.suffix == ".json":
            homes = json.loads(path.read_text("utf-8"))["weight_map"]
        else:
            homes = dict.fromkeys(opened(path.name).keys(), path.name)
        yield lambda name: opened(homes[name]).get_tensor(name) if name in homes else None


def _check_filled(model: nn.Module, made: Mapping[int, Tensor]) -> None:
    names = {id(tensor): name for name, tensor in reversed(list(named_tensors(model)))}
    forgotten = [names.get(key, "?") for key, tensor in made.items() if _is_marked(tensor)]
    if forgotten:
        raise EMPTY_WEIGHTS.refusal(f"init= left {', '.join(forgotten)} without values")


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
