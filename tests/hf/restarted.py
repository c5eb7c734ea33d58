"""A script of a user's, under torchrun: in its first life rank 1 is killed after the third step."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from gapless.distributed import init_process_group
from tests.hf.on_ranks import OWN, SAVED, partly_frozen
from tests.hf.training import arguments, padded, rows
from tests.model.hub import hub


def main() -> None:
    from gapless.hf import PipelineTrainer

    class Killed(hub().TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] + os.environ["RANK"] == "01":
                print("rank 1 leaves at step 3", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    init_process_group("gloo")
    folder = Path(sys.argv[1])
    given: dict[str, Any] = {"train_dataset": rows(28), "data_collator": padded, "callbacks": [Killed()], **OWN}
    trainer = PipelineTrainer(partly_frozen(), arguments(folder, **SAVED), **given)
    trainer.train(resume_from_checkpoint=folder.exists() and any(folder.iterdir()))


if __name__ == "__main__":
    main()
