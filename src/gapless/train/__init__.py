"""Training from a config, in reading order:

config         a TOML file that says what to train, its keys, and the functions that it names
data           where batches come from, and pretrained models
learning_rate  how it changes
host_memory    whether the machine has room for it
torchrun       one process, or the ranks of a run
job            what a config describes, built: model, data, plan, pipeline
run            the loop, what is told of its steps, and the folder of a run

`Trainer` and `Callback` are for programs of one's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.train.run.trainer import Callback, Step, Trainer

__all__ = ["Callback", "Step", "Trainer"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: to read a config needs no loop."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.run.trainer"), name)
