"""Checkpoints: files on disk that appear whole or not at all, and fit any number of devices and ranks:

collection    the checkpoints of a run: the last and the best are kept, a thread writes
listing       what a run's folder has
saveable      what can be saved and goes on from what was: a checkpoint to be read
contents      what is to be saved, as trees of values with tensors beside them, and copied, for a thread that writes
tree          trees of values as JSON
pieces        tensors as blocks of bytes, in safetensors files
manifest      what a checkpoint is, where its bytes are, and their hashes
save          from memory to a checkpoint that is there: one file per rank
disk          what a save does to the disk, one method each, and who is at work in a folder
export        the weights for others: a plain file, or as Hugging Face has them
random_state  the random numbers of a process
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gapless.checkpoint.collection import Checkpoints as Checkpoints


def __getattr__(name: str) -> Any:
    """Loaded when it is first used: a checkpoint is listed and verified without torch."""
    if name == "Checkpoints":
        from gapless.checkpoint.collection import Checkpoints

        return Checkpoints
    raise AttributeError(f"module 'gapless.checkpoint' has no attribute {name!r}")
