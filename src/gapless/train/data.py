"""Batches to train on: real text that every machine has, or what one's own function gives."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.stage import microbatch as mb
from gapless.train import user_code as own
from gapless.train.config import Config

Batch = tuple[Any, Any]  # inputs and target, as `Pipeline.step` takes them

_TEXT = 4_000_000  # bytes of it


def batches(config: Config, files: own.Files | None = None) -> Iterator[Batch]:
    """Without end: where a pass over the data ends, the function is called again, with the seed of the next pass."""
    function = own.load(config.data, config, {} if files is None else files)
    for number in range(2**53):
        empty = True
        found = own.call(function, config.data, config, minibatch=config.minibatch, seed=config.seed + number)
        for batch in _each(config, found):
            if number == 0 and empty:
                _check_size(config, batch)
            empty = False
            yield batch
        if empty:
            raise ConfigError(f"data: {config.data.name} gave no batch in pass {number + 1}")


def _each(config: Config, found: Any) -> Iterator[Batch]:
    name = config.data.name
    try:
        with own.importable(config):
            iterator = iter(found)
    except TypeError:
        raise ConfigError(
            f"data: {name} returned {_shown(found)}, but it must return an iterable of batches (inputs, target)"
        ) from None
    number = 0
    while True:
        number += 1
        with own.importable(config), own.told(f"data: batch {number} of {name}"):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ConfigError(
                f"data: batch {number} of {name} is {_shown(batch)}, but it must be a pair (inputs, target)"
            )
        _check_target(config, f"data: batch {number} of {name}", *batch)
        yield batch[0], batch[1]


def _check_size(config: Config, batch: Batch) -> None:
    size = mb.batch_size(batch[0])
    if size != config.minibatch:
        raise ConfigError(
            f"data.minibatch is {config.minibatch}, but the first batch of {config.data.name} has {size} samples"
        )


def _check_target(config: Config, batch: str, inputs: Any, target: Any) -> None:
    """A loss that we know takes one target for each sample; of one's own nothing can be said."""
    if config.loss is None or config.loss.is_own:
        return
    if target is None:
        raise ConfigError(f"{batch} has the target None, but the loss {config.loss.name} needs one")
    size = mb.batch_size(inputs)
    found = [tensor.size(0) for tensor in mb.flatten(target)[0] if tensor.dim()]
    if found and size not in found:
        raise ConfigError(
            f"{batch} has {size} samples in its inputs and {found[0]} in its target: the first dimension counts them"
        )


def with_shape(batch: Batch) -> str:
    """To tell of a batch with which something failed."""
    inputs, target = batch
    shown = f" with inputs that are {_shown(inputs)}"
    return shown if target is None else f"{shown} and a target that is {_shown(target)}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.40}"


def python_source(minibatch: int, seed: int, context: int = 64) -> Iterator[Batch]:
    """Random windows of the source of Python's standard library, as bytes, and the same windows one byte later."""
    text = standard_library()
    if not isinstance(context, int) or not 0 < context < len(text):
        raise ConfigError(
            f"data.arguments: context is {context!r}, but it must be a whole number from 1 to {len(text) - 1:,}, the "
            "number of bytes"
        )
    return _windows(text, minibatch, seed, context)


def _windows(text: Tensor, minibatch: int, seed: int, context: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(text) - context, (minibatch, 1), generator=generator)
        windows = text[starts + places].long()
        yield windows[:, :-1], windows[:, 1:]


def standard_library() -> Tensor:
    """The source of Python's standard library, as bytes, file after file."""
    text = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += file.read_bytes()
        if len(text) > _TEXT:
            break
    if not text:
        raise ConfigError(f"there is no Python source in {sysconfig.get_paths()['stdlib']}: give data of your own")
    return torch.frombuffer(text, dtype=torch.uint8)
