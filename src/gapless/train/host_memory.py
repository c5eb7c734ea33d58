"""Is there room for what a config asks for? A size with a few digits too many is told before the memory is full: after
that the system kills the process, and nobody learns why.

A model of ours is made on the meta device first, where it takes no memory, and its layers are counted. Of a function of
the user's nothing is known before it has run.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.plain import apply_first
from gapless.train.config import user_code as own
from gapless.train.config.config import Config
from gapless.units import show_bytes

_MOST_LAYERS = 10_000
_CONTROL_GROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may have


def memory_of_the_host() -> int:
    """Bytes, and as many as this process may have where it runs in a container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        found = min(found, int(_CONTROL_GROUP.read_text()))
    return found


def sketched(config: Config, files: own.Files) -> nn.Module | None:
    """The model on the meta device, if it is one of ours; refused where the machine has no room for its weights."""
    part = config.model
    if part.is_own or part.name == "huggingface":
        return None
    depth = part.arguments.get("depth")
    if isinstance(depth, int) and depth > _MOST_LAYERS:
        raise ConfigError(
            f"model.arguments: depth is {depth:,}, but {part.name} takes up to {_MOST_LAYERS:,} layers from a config"
        )
    with torch.device("meta"):
        model = own.call(own.load(part, config, files), part, config)
    assert isinstance(model, nn.Module)
    weights, fixed = (sum(each.nbytes for each in tensors) for tensors in (model.parameters(), model.buffers()))
    refuse_above(
        2 * weights + fixed,
        f"model: {part.name} with these arguments has {show_bytes(weights + fixed)} of weights, and their gradients "
        "take as much again",
        "make it smaller",
    )
    return model


def check_batch(config: Config) -> None:
    """For data of ours: a minibatch is whole numbers of 8 bytes, at its largest the places in the text and what stands
    there.
    """
    if config.data.is_own:
        return
    length = config.data.arguments.get("context", 64)
    if isinstance(length, int):
        size = 2 * 8 * config.data.minibatch * (length + 1)
        what = f"data: a minibatch of {config.data.minibatch:,} samples of {length:,} tokens takes {show_bytes(size)}"
        refuse_above(size, what, "make data.minibatch or context smaller")


def check_activations(config: Config, sketch: nn.Module | None, inputs: Any) -> None:
    """About what the layers keep of a microbatch for its backward: at least one is under way. With remat that is less,
    and a plan has its own account of it.
    """
    layout = config.pipeline
    if sketch is None or layout.microbatches is None or layout.plan is not None or layout.remat not in (None, "none"):
        return
    if not (isinstance(layout.devices, int) or set(layout.devices) == {"cpu"}):
        return
    tensors, shape = mb.flatten(inputs)
    on_meta = mb.unflatten([tensor.to("meta") for tensor in tensors], shape)
    samples = mb.sizes(mb.batch_size(inputs), layout.microbatches)[0]  # of the largest one, which is the first
    size = kept_by_layers(sketch, mb.split(on_meta, layout.microbatches)[0])
    refuse_above(
        size,
        f"a microbatch of {samples:,} samples keeps about {show_bytes(size)} for its backward",
        "use more microbatches, a smaller minibatch, or remat",
    )


def kept_by_layers(sketch: nn.Module, inputs: Any) -> int:
    """What the innermost modules return: about what autograd keeps, since one's output is the next one's input."""
    held: dict[int, Tensor] = {}  # by storage, so that what is changed in place counts once

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            held[output.untyped_storage()._cdata] = output

    leaves = [module for module in sketch.modules() if next(module.children(), None) is None]
    handles = [leaf.register_forward_hook(keep) for leaf in leaves]
    # What does not run here does not run with real numbers either, and is told then.
    with torch.no_grad(), suppress(RuntimeError, TypeError, ValueError, IndexError):
        apply_first(sketch, inputs)
    for handle in handles:
        handle.remove()
    return sum(each.nbytes for each in held.values())


def refuse_above(size: int, what: str, way_out: str) -> None:
    """What takes more than the machine has."""
    there = memory_of_the_host()
    if size > there:
        raise ConfigError(f"{what}, but this machine has {show_bytes(there)} of memory: {way_out}")
