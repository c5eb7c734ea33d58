"""Hugging Face's Trainer on a pipeline, in reading order. It needs the extra `gapless[hf]`:

empty_model       a model without weights, and a pipeline of it; adapters of PEFT on it; `hub_weights`: where its
                  weights are
model_profile     what a model costs, from its config alone
pipeline_trainer  PipelineTrainer, Trainer with its accumulation batches as microbatches
rank_trainer      Trainer as one of several ranks: what they do together, and what one of them writes
trainer_ranks     a process per device, and how Trainer and accelerate see it
unsupported       arguments that are refused, by name
model_proxy       in the place of the model, where Trainer calls it
grouped_loader    a loader whose batches come several at a time
whole_checkpoint  what a kill has left half written is not resumed from
"""

from gapless.errors import ConfigError

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"gapless.hf needs transformers and accelerate, and {error.name} is missing: pip install 'gapless[hf]'"
    ) from None

from gapless.hf.empty_model import empty_model, load
from gapless.hf.pipeline_trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "empty_model", "load"]
