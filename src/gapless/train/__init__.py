"""Training from a config, in reading order:

keys           what a key of a config is: read, checked, and explained in one place
tables         all keys, table by table
config         a TOML file that says what to train
manual         the page of all keys, and a commented config
user_code      the functions that a config names, found and called
sources        where tokens come from: text, records, token files
data           batches, in an order that can be taken up anywhere
pretrained     models of Hugging Face
learning_rate  how it changes
room           whether the machine has room for it
torchrun       one process, or the ranks of a run
job            what a config describes, built: model, data, plan, pipeline

trainer        the loop, and `callbacks`, what is told of its steps
evaluation     the loss on other data, and an early stop
gauge          timelines, bubbles and memory of every n-th step
metrics        JSON lines, TensorBoard, Weights & Biases
display        what one sees while it runs
interrupts     SIGTERM and Ctrl-C

run_folder     where all of it is kept
saver          when it is saved, and how it goes on
record         its report
training       a run from its config to its end

`Trainer` and `Callback` are for programs of one's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.train.callbacks import Callback, Step
    from gapless.train.trainer import Trainer

__all__ = ["Callback", "Step", "Trainer"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: to read a config needs no loop."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'trainer' if name == 'Trainer' else 'callbacks'}"), name)
